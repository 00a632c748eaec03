"""Judge a claim: apply its rule to what was measured, after its needs.

A verdict says what this run can say. Only a run at the claim's tier reproduces it or fails to. Below the tier only the
side counts: what lies on the claimed one is "direction only", what lies on the other "opposite here". An interval on
both sides is "inconclusive", with the number of seeds that would decide; a claim whose needs are not met is "not
testable here".
"""

import math
import operator
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from skiplab.companion import deciding
from skiplab.companion.claims import DISAGREE, OURS, UNCHECKABLE, VAGUE, Claim, Test
from skiplab.companion.deciding import CONTRADICTED, HOLDS, INCONCLUSIVE, Interval
from skiplab.errors import InputError

RANK = {"smoke": 0, "custom": 0, "quick": 0, "replicate": 0, "gpu": 1, "paper": 2}

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
DIRECTION_ONLY, OPPOSITE = "direction only", "opposite here"
FALSE = "false in the form our sources give"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
TIMED = "depends on the processor"  # how the tables count the claims about times, whose verdict names processors
VERDICTS = (
    REPRODUCED, DIRECTION_ONLY, OPPOSITE, NOT_REPRODUCED, FALSE, INCONCLUSIVE, NOT_TESTABLE, TIMED, VAGUE, DISAGREE,
    UNCHECKABLE, NOT_RUN,
)  # fmt: skip
FAILS, UNDECIDED = "does not hold", "undecided"  # what times say on one processor
NOT_RECORDED = "not recorded"  # the processor of runs that do not name theirs


@dataclass(frozen=True)
class Need:
    """Whether what a claim needs is true of these runs, and what was found, in words."""

    met: bool
    found: str

    def __post_init__(self) -> None:
        """Take numpy's truth values too; refuse what is none."""
        if isinstance(self.met, str) or self.met not in (True, False) or not isinstance(self.found, str):
            raise InputError(f"a need is met or not, and says what was found, not {self.met!r}: {self.found!r}")
        object.__setattr__(self, "met", bool(self.met))


@dataclass(frozen=True)
class Measurement:
    """What a notebook measured: `values`, one a seed, or `violations` among `cases`; and the `runs` it came from.

    `needs` says of each of the claim's needs whether it is met. `processors` computed it; `record` fills them in. The
    ledger keeps times as `by_processor`, each one's own values.
    """

    values: tuple[float, ...] = ()
    runs: tuple[str, ...] = ()
    note: str = ""
    violations: int | None = None
    cases: int | None = None
    processors: tuple[str, ...] = ()
    by_processor: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    needs: Mapping[str, Need] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take numpy's numbers too; refuse what is no number."""
        try:
            if any(isinstance(part, str) for part in (self.values, self.runs, self.processors)):
                raise TypeError("values, runs and processors are tuples, not text")
            plain = {
                "values": tuple(map(float, self.values)),
                "runs": tuple(map(str, self.runs)),
                "processors": tuple(map(str, self.processors)),
                "by_processor": {str(name): tuple(map(float, row)) for name, row in self.by_processor.items()},
            }
            counts = {"violations": self.violations, "cases": self.cases}
            plain |= {name: None if count is None else operator.index(count) for name, count in counts.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"a measurement has numbers as values and whole numbers as counts ({error})") from error
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> Mapping[str, tuple[float, ...]]:
        """Return times by the processor they were measured on."""
        return self.by_processor or (
            {self.processors[0] if self.processors else NOT_RECORDED: self.values} if self.values else {}
        )


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured for it at which preset, and what its rule says; `detail` gives the reason in words."""

    claim: Claim
    verdict: str
    detail: str = ""
    preset: str = ""
    measurement: Measurement = field(default_factory=Measurement)

    @property
    def group(self) -> str:
        """Return which of VERDICTS it counts as: TIMED for times, whose verdict names a number of processors."""
        return TIMED if self.claim.rule.kind == "timing" and self.verdict != NOT_RUN else self.verdict

    @property
    def in_words(self) -> str:
        """Return the verdict for a table: a statement of ours is false as we gave it, not as our sources do."""
        return "false" if self.verdict == FALSE and self.claim.whose == OURS else self.verdict

    @property
    def n(self) -> int:
        """Return the number of values, on all processors together, or of cases."""
        values = self.measurement.values or sum(self.measurement.by_processor.values(), ())
        return len(values) or self.measurement.cases or 0

    @property
    def measured(self) -> str:
        """Return the measurement and its interval in words, '80.5 (79.8 to 81.2) % top-1'; for times the range."""
        if self.claim.rule.kind == "timing":
            ranges = [range_of(values, self.claim.unit) for values in self.measurement.rows.values()]
            return f"{' / '.join(ranges)} {self.claim.unit}" if ranges else ""
        if self.measurement.cases is not None and self.claim.rule.kind == "statement":
            return f"{self.measurement.violations} of {self.measurement.cases} violate it"
        if not self.measurement.values and not self.measurement.cases:
            return ""
        if infinite := not_finite(self.measurement.values):
            return infinite
        if len(self.measurement.values) == 1:
            return f"{plain(self.measurement.values[0], self.claim.unit)} {self.claim.unit}"
        found = interval(self.measurement)
        ends = " to ".join(plain(end, self.claim.unit) for end in (found.low, found.high))
        return f"{plain(found.mean, self.claim.unit)} ({ends}) {self.claim.unit}"

    def __str__(self) -> str:
        """Return the one line that a check cell prints."""
        reason = "; ".join(part for part in (self.measured, self.detail) if part)
        return f"{self.claim.id}: {self.verdict}" + (f" ({reason})" if reason else "")


def judge(claim: Claim, measurement: Measurement, preset: str) -> Verdict:
    """Apply a claim's rule; smoke and custom count as quick."""
    verdict, detail = _decide(claim, measurement, preset)
    return Verdict(claim, verdict, "; ".join(part for part in (detail, measurement.note) if part), preset, measurement)


def mean_sd(values: Collection[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; nan where values are not finite, and sd 0 of a single value."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def interval(measurement: Measurement) -> Interval:
    """Return the interval of a measurement's mean, or of its share of cases in percent."""
    if measurement.cases:
        return deciding.share_interval(measurement.violations, measurement.cases)
    return deciding.mean_interval(measurement.values)


def _decide(claim: Claim, measurement: Measurement, preset: str) -> tuple[str, str]:
    rule = claim.rule
    if rule.kind == "fixed":
        return rule.verdict, "; ".join(part for part in (_nearest(claim, measurement), rule.evidence) if part)
    if rule.kind == "timing":
        return _decide_times(claim, measurement, preset)
    at_tier = RANK[preset] >= RANK[claim.tier]
    if missing := _missing(claim, measurement, at_tier):
        return NOT_RUN, missing
    said = {name: measurement.needs.get(name, Need(False, "nothing is said of it")) for name in claim.needs}
    unmet = [f"needs {name}: {need.found}" for name, need in said.items() if not need.met]
    if unmet:
        return NOT_TESTABLE, "; ".join(unmet)
    if not_finite(measurement.values):
        return NOT_TESTABLE, "a value that is not finite cannot be compared"
    outcome, detail = _outcome(claim, measurement, at_tier)
    positive, negative = (REPRODUCED, NOT_REPRODUCED) if at_tier else (DIRECTION_ONLY, OPPOSITE)
    if rule.kind == "statement" and at_tier:
        negative = FALSE
    return {HOLDS: positive, CONTRADICTED: negative, INCONCLUSIVE: INCONCLUSIVE}[outcome], detail


def _missing(claim: Claim, measurement: Measurement, at_tier: bool) -> str:
    """Say what a measurement lacks for its rule to decide anything; empty where nothing is missing."""
    rule, count = claim.rule, len(measurement.values)
    if rule.kind in ("statement", "share"):
        refuted = rule.kind == "statement" and measurement.violations  # however few the cases
        return "" if refuted or (measurement.cases or 0) >= rule.cases else f"{rule.cases} cases are needed"
    if rule.kind == "exact":
        return "" if count else "no value"
    test = _test(claim, at_tier)
    if test is None:
        return f"a number to compare from preset {claim.tier} on"
    return "" if count >= test.seeds else f"{count} of {test.seeds} seeds"


def _outcome(claim: Claim, measurement: Measurement, at_tier: bool) -> tuple[str, str]:
    """Return whether the claim holds, is contradicted, or neither, and why in words, where that is not plain."""
    rule, centre = claim.rule, claim.value or 0.0
    if rule.kind == "statement":
        return CONTRADICTED if measurement.violations else HOLDS, ""
    test = _test(claim, at_tier)
    if rule.kind == "exact":
        return HOLDS if _holds(test, measurement.values[0], centre) else CONTRADICTED, ""
    found = interval(measurement)
    if test.op == "within":
        outcome = deciding.decide_within(found, centre, test.threshold)
        return outcome, _seeds_needed(claim, found, test.threshold) if outcome == INCONCLUSIVE else ""
    effect = _effect(found, test)
    outcome = deciding.decide_effect(effect, test.least if at_tier else 0.0, test.most)
    return outcome, _effect_in_words(claim, effect, test, outcome)


def _effect_in_words(claim: Claim, effect: Interval, test: Test, outcome: str) -> str:
    """Say of an effect on the claimed side, or on both, why it does not hold."""
    if outcome == HOLDS or effect.high < 0:
        return ""
    if effect.low > test.most:
        return f"beyond {test.most:g}, the most that is claimed"
    if effect.high < test.least:
        return f"any effect is smaller than {test.least:g}, the least of interest"
    return _seeds_needed(claim, effect, test.least)


def _seeds_needed(claim: Claim, found: Interval, width: float) -> str:
    """Say how many seeds would give an interval narrower than `width`; empty where that is unknown or out of reach."""
    count = None if claim.rule.kind == "share" else deciding.values_needed(found.sd, width)
    return f"about {count} seeds would decide" if count else ""


def _test(claim: Claim, at_tier: bool) -> Test | None:
    """Return the test that decides at the claim's tier or below it; None where the number cannot be compared there."""
    rule = claim.rule
    if rule.test:
        return replace(rule.test, seeds=rule.seeds)
    within = Test("within", claim.tolerance, seeds=rule.seeds)
    return within if at_tier or rule.kind == "exact" else rule.lower


def _effect(found: Interval, test: Test) -> Interval:
    """Return how far an interval lies beyond a test's threshold, on the side that the test names."""
    low, high = found.low - test.threshold, found.high - test.threshold
    if test.op == "below":
        low, high = -high, -low
    return Interval((low + high) / 2, low, high, found.sd, found.n)


def _decide_times(claim: Claim, measurement: Measurement, preset: str) -> tuple[str, str]:
    """Say on how many processors a claim about times holds, and what each one says."""
    rows, count = measurement.rows, claim.rule.repetitions
    enough = {name: values for name, values in rows.items() if len(values) >= count}
    said = {name: f"{len(values)} of {count} repetitions" for name, values in rows.items()}
    said |= {name: on_one(claim, values, preset) for name, values in enough.items()}
    detail = "; ".join(f"{name}: {word}" for name, word in said.items()) or f"0 of {count} repetitions"
    if not enough:
        return NOT_RUN, detail
    what = HOLDS if RANK[preset] >= RANK[claim.tier] else f"direction {HOLDS}"
    held = sum(said[name] == HOLDS for name in enough)
    return f"{what} on {held} of {len(enough)} processor{'s' if len(enough) > 1 else ''}", detail


def on_one(claim: Claim, values: tuple[float, ...], preset: str) -> str:
    """Say what times on one processor decide: nothing where their range lies on both sides of the threshold."""
    rule, centre = claim.rule, claim.value or 0.0
    test = rule.lower if rule.lower and RANK[preset] < RANK[claim.tier] else rule.test
    if not_finite(values):
        return FAILS
    low, high = min(values), max(values)
    ends = [_holds(test, end, centre) for end in (low, high)]
    around = test.op == "within" and low < centre < high
    return HOLDS if all(ends) else UNDECIDED if any(ends) or around else FAILS


def _holds(test: Test, value: float, centre: float) -> bool:
    """Tell whether one number satisfies a test."""
    if test.op == "below":
        return value < test.threshold
    if test.op == "above":
        return value > test.threshold
    return abs(value - centre) <= test.threshold + 1e-9 * max(1.0, abs(centre))  # 81.3 - 81.0 > 0.3 in binary


def _nearest(claim: Claim, measurement: Measurement) -> str:
    """Say with which of the values in the sources the mean agrees; empty where none, or no tolerance, is given."""
    if not measurement.values or claim.value is None or not claim.tolerance:
        return ""
    given = claim.value if isinstance(claim.value, tuple) else (claim.value,)
    mean = mean_sd(measurement.values)[0]
    near = [plain(value, claim.unit) for value in given if _holds(Test("within", claim.tolerance), mean, value)]
    return f"measured value agrees with {' and '.join(near) or 'none of the values given'}"


def plain(value: float, unit: str) -> str:
    """Write a number the way its unit is read: percent with one decimal, points with their sign."""
    if unit.startswith("points"):
        return f"{value:+.1f}"
    if unit.startswith("%"):
        return f"{value:.1f}"
    return f"{value:.2f}" if "κ" in unit else f"{value:.3g}"


def range_of(values: tuple[float, ...], unit: str) -> str:
    """Write the range of values, such as '2.37 to 2.4'."""
    ends = sorted({plain(end, unit): end for end in (min(values), max(values))}.items(), key=lambda item: item[1])
    return not_finite(values) or " to ".join(text for text, _ in ends)


def not_finite(values: tuple[float, ...]) -> str:
    """Say how many values are infinite or not a number; empty where none is."""
    count = sum(not math.isfinite(value) for value in values)
    return f"{count} of {len(values)} values not finite" if count else ""
