"""The ledger: every claim of the papers, what we measured, and the verdict that the claim's rule gives.

The claims and their rules are in data/claims.yaml, which explains the vocabulary. A notebook calls `record` once, in
its check cell; the README and the overview show `table`, `markdown` and `summary`. Verdicts are computed from the
measured values whenever they are read, so nobody can type one.
"""

import json
import math
import operator
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as short

import pandas as pd
import yaml

from skiplab import files
from skiplab.errors import InputError, unknown

CLAIMS = files.ROOT / "data" / "claims.yaml"
LEDGER = files.ROOT / "data" / "ledger"  # committed: the presets in TIERS, and replicate: quick with other seeds
SCRATCH = files.ROOT / "build" / "ledger"  # not committed: smoke, and custom (a run with changed parameters)

TIERS = ("quick", "gpu", "paper")
UNCOMMITTED = ("smoke", "custom")
RANK = {"smoke": 0, "custom": 0, "quick": 0, "replicate": 0, "gpu": 1, "paper": 2}
NOTEBOOKS = ("01_skip_removal", "02_token_graying", "03_low_pass", "04_bounds", "05_anti_oversmoothing", "06_skipless")

REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED, NOT_RUN = "reproduced", "direction only", "not reproduced", "not run"
FALSE = "false as stated"
VAGUE, DISAGREE, UNCHECKABLE = "vague", "sources disagree", "cannot be checked from our sources"
TIMED = "depends on the processor"  # how the tables count the claims about times, whose verdict names processors
VERDICTS = (REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED, FALSE, TIMED, VAGUE, DISAGREE, UNCHECKABLE, NOT_RUN)
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"  # what times say on one processor

SCHEMA = 2
NOT_RECORDED = "not recorded"  # the processor of what a file of schema 1 holds


@dataclass(frozen=True)
class Test:
    """Ask whether a mean, or a whole range of times, is on the right side of a threshold, `by_sd` sd to spare."""

    op: str  # below, above, or within (a distance from the claim's value)
    threshold: float
    by_sd: float
    seeds: int = 0


@dataclass(frozen=True)
class Rule:
    """How a claim is decided; data/claims.yaml explains the kinds."""

    kind: str
    statistic: str = ""
    seeds: int = 0
    cases: int = 0
    repetitions: int = 0
    choose: str = ""
    test: Test | None = None
    lower: Test | None = None
    verdict: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, or one of ours about it."""

    id: str
    paper: str
    where: str
    statement: str
    notebook: str
    tier: str
    rule: Rule
    value: float | tuple[float, ...] | None = None
    unit: str = ""
    tolerance: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Measurement:
    """What a notebook measured: `values`, one a seed, or `violations` among `cases`; and the `runs` it came from.

    `processors` computed it; `record` fills them in. The ledger keeps times as `by_processor`, each one's own values.
    """

    values: tuple[float, ...] = ()
    runs: tuple[str, ...] = ()
    note: str = ""
    violations: int | None = None
    cases: int | None = None
    processors: tuple[str, ...] = ()
    by_processor: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

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
    def n(self) -> int:
        """Return the number of values, on all processors together, or of cases."""
        values = self.measurement.values or sum(self.measurement.by_processor.values(), ())
        return len(values) or self.measurement.cases or 0

    @property
    def measured(self) -> str:
        """Return the measurement in words, such as '80.5 ± 0.7 % top-1', or for times the range on each processor."""
        if self.claim.rule.kind == "timing":
            ranges = [_range(values, self.claim.unit) for values in self.measurement.rows.values()]
            return f"{' / '.join(ranges)} {self.claim.unit}" if ranges else ""
        if self.measurement.cases is not None:
            return f"{self.measurement.violations} of {self.measurement.cases} violate it"
        if not self.measurement.values:
            return ""
        infinite = _not_finite(self.measurement.values)
        if infinite:
            return infinite
        mean, sd = mean_sd(self.measurement.values)
        spread = f" ± {_plain(sd, self.claim.unit).lstrip('+')}" if self.n > 1 else ""
        return f"{_plain(mean, self.claim.unit)}{spread} {self.claim.unit}"

    def __str__(self) -> str:
        """Return the one line that a check cell prints."""
        reason = "; ".join(part for part in (self.measured, self.detail) if part)
        return f"{self.claim.id}: {self.verdict}" + (f" ({reason})" if reason else "")


def claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """Return every claim by its id. Raises InputError, in one line that names the entry, where the file is wrong."""
    return dict(_read(path)[0])


def papers(path: Path = CLAIMS) -> dict[str, str]:
    """Return each paper's full citation by its short name."""
    return dict(_read(path)[1])


def record(
    measurements: Mapping[str, Measurement], *, notebook: str, preset: str, folder: Path | None = None
) -> list[Verdict]:
    """Judge what a notebook measured and store it as `<preset>/<notebook>.json`, in place of what was there.

    The file is written whole or not at all, and belongs to this notebook and preset alone, so that jobs never collide.
    It goes to LEDGER, to SCRATCH for the presets smoke and custom, or to `folder`. Verdicts come in the order of
    data/claims.yaml. What stored runs measured carries their processors, anything else this machine's. Times measured
    on other processors stay beside the new ones. Raises InputError for an unknown claim, one of another notebook, or a
    malformed measurement.
    """
    _choice("notebook", notebook, NOTEBOOKS)
    _choice("preset", preset, RANK)
    known = claims()
    for name, measurement in measurements.items():
        _check(name, measurement, known, notebook)
    path = (folder or (SCRATCH if preset in UNCOMMITTED else LEDGER)) / preset / f"{notebook}.json"
    before = _rows_before(path)
    judged = [
        judge(known[name], _placed(known[name], measurements[name], before.get(name, {})), preset)
        for name in known
        if name in measurements
    ]
    content = {
        "schema": SCHEMA,
        "notebook": notebook,
        "preset": preset,
        "claims": {verdict.claim.id: _store(verdict) for verdict in judged},
    }
    files.write(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
    return judged


def judge(claim: Claim, measurement: Measurement, preset: str) -> Verdict:
    """Apply a claim's rule: what holds below its tier is "direction only"; smoke and custom count as quick."""
    verdict, detail = _decide(claim, measurement, preset)
    return Verdict(claim, verdict, "; ".join(part for part in (detail, measurement.note) if part), preset, measurement)


def verdicts(folder: Path | None = None) -> list[Verdict]:
    """Return one verdict a claim, in the order of data/claims.yaml: that of the highest tier at which it was decided.

    Raises InputError where a file is damaged, or where its rule now gives another verdict than when it was run.
    """
    best = stored("quick", folder)
    for preset in TIERS[1:]:
        for name, verdict in stored(preset, folder).items():
            decided = verdict.preset and verdict.verdict != NOT_RUN
            if decided or (verdict.preset and best[name].verdict == NOT_RUN):
                best[name] = verdict
    return list(best.values())


def stored(preset: str, folder: Path | None = None) -> dict[str, Verdict]:
    """Return one verdict a claim by its id, from what is stored of one preset; raises InputError as `verdicts` does."""
    found = {
        claim.id: Verdict(claim, claim.rule.verdict or NOT_RUN, claim.rule.evidence) for claim in claims().values()
    }
    for path in sorted(((folder or LEDGER) / preset).glob("*.json")):
        found |= {verdict.claim.id: verdict for verdict in _load(path)}
    return found


def processors(preset: str, folder: Path | None = None) -> dict[str, int]:
    """Return on which processors the stored values of a preset were computed: each name and of how many claims."""
    names = [name for verdict in stored(preset, folder).values() for name in verdict.measurement.processors]
    return {name: names.count(name) for name in sorted(set(names))}


def table(notebook: str | None = None, folder: Path | None = None) -> pd.DataFrame:
    """Return the ledger, one row a claim, of one notebook or of all."""
    if notebook is not None:
        _choice("notebook", notebook, NOTEBOOKS)
    rows = [
        {
            "claim": verdict.claim.id,
            "statement": verdict.claim.statement,
            "paper's value": _value(verdict.claim),
            "measured": verdict.measured,
            "n": verdict.n,
            "verdict": verdict.verdict,
            "group": verdict.group,
            "preset": verdict.preset,
            "notebook": verdict.claim.notebook,
            "detail": verdict.detail,
        }
        for verdict in verdicts(folder)
        if notebook in (None, verdict.claim.notebook)
    ]
    return pd.DataFrame(rows)


def markdown(notebook: str | None = None, folder: Path | None = None, *, folded: bool = False) -> str:
    """Return the ledger as one Markdown table a paper; claims that were not run are only counted.

    `folded` puts each table behind a line to click on, under a table that counts the verdicts.
    """
    rows = table(notebook, folder)
    columns = ["claim", "paper's value", "measured", "n", "verdict", "preset", "detail"]
    parts = [_counts(rows)] if folded else []
    for paper, citation in papers().items():
        mine = rows[rows["claim"].str.startswith(f"{paper}.")]
        if mine.empty:
            continue
        shown = mine[(mine["verdict"] != NOT_RUN) | (mine["n"] > 0)]
        waiting = f"Not run yet: {len(mine) - len(shown)} of {len(mine)} claims.\n" if len(mine) > len(shown) else ""
        named = shown.assign(claim=shown["statement"] + " `" + shown["claim"] + "`")
        content = (grid(columns, named[columns].itertuples(index=False)) if len(shown) else "") + waiting
        if folded:
            count = f"{len(shown)} of {len(mine)} claims"
            parts.append(f"<details>\n<summary>{citation} ({count})</summary>\n\n{content}\n</details>\n")
        else:
            parts.append(f"**{citation}**\n\n{content}")
    return "\n".join(parts)


def _counts(rows: pd.DataFrame) -> str:
    """Return a Markdown table: how many claims of each paper have which verdict."""
    paper = rows["claim"].str.partition(".")[0].map({name: text.split(". ")[-3] for name, text in papers().items()})
    counts = rows.groupby([paper, "group"], sort=False).size().unstack(fill_value=0)
    verdicts_seen = [verdict for verdict in VERDICTS if verdict in counts]
    return grid(["claims of", *verdicts_seen], counts[verdicts_seen].itertuples())


def grid(columns: Sequence[str], rows: Iterable[tuple]) -> str:
    """Return a Markdown table, and an empty line."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def summary(folder: Path | None = None) -> dict[str, int]:
    """Return how many claims have each verdict."""
    found = [verdict.group for verdict in verdicts(folder)]
    return {verdict: found.count(verdict) for verdict in VERDICTS}


def mean_sd(values: Collection[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; nan where values are not finite, and sd 0 of a single value."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


# --- Deciding ---------------------------------------------------------------------------------------------------


def _decide(claim: Claim, measurement: Measurement, preset: str) -> tuple[str, str]:
    rule, values = claim.rule, measurement.values
    if rule.kind == "fixed":
        return rule.verdict, "; ".join(part for part in (_nearest(claim, values), rule.evidence) if part)
    if rule.kind == "timing":
        return _decide_times(claim, measurement, preset)
    positive = REPRODUCED if RANK[preset] >= RANK[claim.tier] else DIRECTION_ONLY
    if rule.kind == "statement":
        if measurement.violations:
            return FALSE, ""
        return (positive, "") if measurement.cases >= rule.cases else (NOT_RUN, f"{rule.cases} cases are needed")
    test = _test_at(claim, preset)
    if test is None:
        return NOT_RUN, f"a number to compare from preset {claim.tier} on"
    if len(values) < test.seeds:
        return NOT_RUN, f"{len(values)} of {test.seeds} seeds"
    if _not_finite(values):
        return NOT_REPRODUCED, ""
    return (positive if _holds(test, values, claim.value or 0.0) else NOT_REPRODUCED), ""


def _decide_times(claim: Claim, measurement: Measurement, preset: str) -> tuple[str, str]:
    """Say on how many processors a claim about times holds, and what each one says."""
    rows, count = measurement.rows, claim.rule.repetitions
    enough = {name: values for name, values in rows.items() if len(values) >= count}
    said = {name: f"{len(values)} of {count} repetitions" for name, values in rows.items()}
    said |= {name: _on_one(claim, values, preset) for name, values in enough.items()}
    detail = "; ".join(f"{name}: {word}" for name, word in said.items()) or f"0 of {count} repetitions"
    if not enough:
        return NOT_RUN, detail
    what = HOLDS if RANK[preset] >= RANK[claim.tier] else f"direction {HOLDS}"
    held = sum(said[name] == HOLDS for name in enough)
    return f"{what} on {held} of {len(enough)} processor{'s' if len(enough) > 1 else ''}", detail


def _on_one(claim: Claim, values: tuple[float, ...], preset: str) -> str:
    """Say what times on one processor decide: nothing where their range lies on both sides of the threshold."""
    rule, centre = claim.rule, claim.value or 0.0
    test = rule.lower if rule.lower and RANK[preset] < RANK[claim.tier] else rule.test
    if _not_finite(values):
        return FAILS
    low, high = min(values), max(values)
    ends = [_holds(test, (end,), centre) for end in (low, high)]
    around = test.op == "within" and low < centre < high
    return HOLDS if all(ends) else UNDECIDED if any(ends) or around else FAILS


def _test_at(claim: Claim, preset: str) -> Test | None:
    """Return the test that decides at this preset, or None where the number cannot be compared there."""
    rule = claim.rule
    if rule.kind == "direction":
        return Test(rule.test.op, rule.test.threshold, rule.test.by_sd, rule.seeds)
    if RANK[preset] < RANK[claim.tier]:
        return rule.lower
    return Test("within", claim.tolerance, 1.0 if rule.kind == "equivalence" else 0.0, rule.seeds)


def _holds(test: Test, values: tuple[float, ...], centre: float) -> bool:
    mean, sd = mean_sd(values)
    margin = test.by_sd * sd
    if test.op == "below":
        return mean + margin < test.threshold
    if test.op == "above":
        return mean - margin > test.threshold
    return abs(mean - centre) + margin <= test.threshold + 1e-9  # 81.3 - 81.0 is not quite 0.3 in binary


def _nearest(claim: Claim, values: tuple[float, ...]) -> str:
    """Say which of the values in the sources a measurement agrees with."""
    if not values or claim.value is None:
        return ""
    given = claim.value if isinstance(claim.value, tuple) else (claim.value,)
    near = [_plain(value, claim.unit) for value in given if _holds(Test("within", claim.tolerance, 0.0), values, value)]
    return f"measured value agrees with {' and '.join(near) or 'none of the values given'}"


# --- Files ------------------------------------------------------------------------------------------------------


def _check(name: str, measurement: Measurement, known: Mapping[str, Claim], notebook: str) -> None:
    """Refuse a measurement that does not fit its claim."""
    if name not in known:
        raise unknown("claim", name, [claim.id for claim in known.values() if claim.notebook == notebook])
    claim = known[name]
    if claim.notebook != notebook:
        raise InputError(f"{name} belongs to notebook {claim.notebook}, not to {notebook}")
    violations, cases = measurement.violations, measurement.cases
    if measurement.by_processor and (claim.rule.kind != "timing" or measurement.values):
        raise InputError(f"{name} has by_processor, which only claims about times have, and in place of values")
    if claim.rule.kind != "statement":
        if (violations, cases) != (None, None):
            raise InputError(f"{name} is no statement: give values, no violations and cases")
    elif violations is None or cases is None or not 0 <= violations <= cases or measurement.values:
        raise InputError(f"{name} is a statement: give 0 <= violations <= cases and no values")
    elif violations and not measurement.note:
        raise InputError(f"{name} has violations: describe a counterexample in the note")


def _placed(claim: Claim, measurement: Measurement, before: Mapping[str, tuple[float, ...]]) -> Measurement:
    """Say which processors computed a measurement; put times beside those measured `before` on others."""
    from skiplab.companion import provenance, runs  # readers of the ledger need no torch

    computed = measurement.processors or runs.processors(measurement.runs)
    if not computed:
        computed = (NOT_RECORDED if measurement.runs else provenance.machine("cpu")["device_name"],)
    measurement = replace(measurement, processors=computed)
    if claim.rule.kind != "timing":
        return measurement
    rows = dict(sorted({**before, **measurement.rows}.items()))
    return replace(measurement, values=(), processors=tuple(rows or computed), by_processor=rows)


def _rows_before(path: Path) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return each claim's times by processor as a file holds them; nothing of a file that cannot be read.

    A processor without a name is left out: it might be the one that measures now.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["claims"]
        found = {name: dict(_measurement(entry).by_processor) for name, entry in entries.items()}
        for rows in found.values():
            rows.pop(NOT_RECORDED, None)
        return found
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return {}


def _store(verdict: Verdict) -> dict[str, object]:
    measurement = verdict.measurement
    entry = {
        "verdict": verdict.verdict,
        "runs": list(measurement.runs),
        "note": measurement.note,
        "processors": list(measurement.processors),
    }
    if measurement.cases is not None:
        return entry | {"violations": measurement.violations, "cases": measurement.cases}
    if verdict.claim.rule.kind == "timing":
        return entry | {
            "by_processor": {
                name: {"values": _words(values), "verdict": _on_one(verdict.claim, values, verdict.preset)}
                for name, values in measurement.by_processor.items()
            }
        }
    return entry | {"values": _words(measurement.values)}


def _words(values: tuple[float, ...]) -> list[float | str]:
    """Write infinities, which JSON has not, as the words inf, -inf and nan, which float() reads."""
    return [value if math.isfinite(value) else str(value) for value in values]


def _measurement(entry: Mapping) -> Measurement:
    """Return what an entry of a file holds."""
    parts = {part: value for part, value in entry.items() if part not in ("verdict", "by_processor")}
    rows = {name: row["values"] for name, row in entry.get("by_processor", {}).items()}
    return Measurement(**parts, by_processor=rows)


def _upgraded(content: dict, known: Mapping[str, Claim]) -> dict:
    """Return a file of schema 1 as one of schema 2: it named no processor, and another rule judged its times."""
    entries = {}
    for name, entry in content["claims"].items():
        entries[name] = entry | {"processors": [NOT_RECORDED]}
        if name in known and known[name].rule.kind == "timing":
            values = entries[name].pop("values")
            rows = {NOT_RECORDED: {"values": values}} if values else {}
            entries[name] |= {"by_processor": rows, "verdict": None}
    return content | {"schema": SCHEMA, "claims": entries}


def _load(path: Path) -> list[Verdict]:
    """Read one file of the ledger and judge it anew."""
    notebook, preset = path.stem, path.parent.name
    known = claims()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("schema") not in (1, SCHEMA):
            raise InputError(f"its schema is {short(content.get('schema'))}, not {SCHEMA}")
        _fields("file", content, ("schema", "notebook", "preset", "claims"))
        if content["schema"] == 1:
            content = _upgraded(content, known)
        if (content["notebook"], content["preset"]) != (notebook, preset):
            raise InputError(f"it holds {short(content['notebook'])} in preset {short(content['preset'])}")
        result = []
        for name, entry in content["claims"].items():
            measured = ("values", "violations", "cases", "by_processor")
            _fields(name, entry, ("verdict", "runs", "note", "processors"), measured)
            measurement = _measurement(entry)
            _check(name, measurement, known, notebook)
            result.append(judge(known[name], measurement, preset))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged or of another version ({error}): delete it and rerun {notebook} in preset {preset}"
        ) from error
    for verdict in result:
        old = content["claims"][verdict.claim.id]["verdict"]
        if old not in (verdict.verdict, None):  # None: what _upgraded leaves
            raise InputError(
                f"{path}: rule of {verdict.claim.id} changed after the run: rerun {notebook} in preset {preset} "
                f"(stored: {short(old)}, by the rule of now: {verdict.verdict!r})"
            )
    return result


# --- Showing ----------------------------------------------------------------------------------------------------


def _plain(value: float, unit: str) -> str:
    """Write a number the way its unit is read: percent with one decimal, points with their sign."""
    if unit.startswith("points"):
        return f"{value:+.1f}"
    if unit.startswith("%"):
        return f"{value:.1f}"
    return f"{value:.2f}" if "κ" in unit else f"{value:.3g}"


def _range(values: tuple[float, ...], unit: str) -> str:
    """Write the range of values, such as '2.37 to 2.4'."""
    ends = sorted({_plain(end, unit): end for end in (min(values), max(values))}.items(), key=lambda item: item[1])
    return _not_finite(values) or " to ".join(text for text, _ in ends)


def _value(claim: Claim) -> str:
    if claim.value is None:
        return ""
    given = claim.value if isinstance(claim.value, tuple) else (claim.value,)
    return f"{' / '.join(_plain(value, claim.unit) for value in given)} {claim.unit}"


def _not_finite(values: tuple[float, ...]) -> str:
    """Say how many values are infinite or not a number; empty where none is."""
    count = sum(not math.isfinite(value) for value in values)
    return f"{count} of {len(values)} values not finite" if count else ""


def _cell(value: object) -> str:
    return str(value or "").replace("|", "\\|").replace("\n", " ")


# --- Reading data/claims.yaml strictly --------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Claim], dict[str, str]]:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


@lru_cache(maxsize=4)
def _parse(text: str) -> tuple[dict[str, Claim], dict[str, str]]:
    try:
        tree, content = yaml.compose(text, yaml.CSafeLoader), yaml.load(text, yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}") from error
    _refuse_duplicates(tree, set())
    _fields("file", content, ("papers", "choose", "claims"), ("shared",))
    for part in ("papers", "choose", "claims"):
        if not isinstance(content[part], dict):
            raise InputError(f"{part} must be a block of named entries, not {short(content[part])}")
    for part in ("papers", "choose"):
        for name, line in content[part].items():
            _text(f"{part}: {name}", line)
    result = {}
    for name, entry in content["claims"].items():
        try:
            result[name] = _claim(name, entry, content["papers"], content["choose"])
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return result, content["papers"]


def _refuse_duplicates(node: yaml.Node | None, seen: set[int]) -> None:
    """Refuse a key given twice in one block, of which YAML would silently keep the last."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    keys = set()
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            key, item = item
            if str(key.value) in keys:
                raise InputError(f"{key.value!r} is given twice (line {key.start_mark.line + 1})")
            keys.add(str(key.value))
        _refuse_duplicates(item, seen)


def _fields(kind: str, entry: object, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Refuse a block that lacks a field or has an unknown one."""
    if not isinstance(entry, dict):
        raise InputError(f"{kind} must be a block of fields, not {short(entry)}")
    for name in entry:
        _choice(f"field of {kind}", name, {*required, *optional})
    for name in sorted(set(required) - entry.keys()):
        raise InputError(f"{kind} lacks {name!r}")


def _choice(kind: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise unknown(kind, value, allowed)
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be text, not {short(value)}")
    return value


def _number(name: str, value: object, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        hint = " (YAML reads 3e-4 as text: write 3.0e-4)" if isinstance(value, str) else ""
        raise InputError(f"{name} must be a finite number{' >= 0' if least == 0 else ''}, not {short(value)}{hint}")
    return float(value)


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{name} must be a whole number >= 1, not {short(value)}")
    return value


def _value_or_values(name: str, value: object) -> float | tuple[float, ...]:
    return tuple(_number(name, item) for item in value) if isinstance(value, list) else _number(name, value)


def _test(name: str, entry: object, required: tuple = ("by_sd",), optional: tuple = ("seeds",)) -> Test:
    _fields(name, entry, required, (*optional, *OPS))
    ops = [op for op in OPS if op in entry]
    if len(ops) != 1:
        raise InputError(f"{name} needs exactly one of {', '.join(OPS)}")
    seeds = _count("seeds", entry["seeds"]) if "seeds" in entry else 0
    return Test(ops[0], _number(ops[0], entry[ops[0]]), _number("by_sd", entry.get("by_sd", 0), 0), seeds)


OPS = ("below", "above", "within")
FIXED = (VAGUE, DISAGREE, UNCHECKABLE)
# kind of rule -> the fields it must have, those it may have, and those its claim must have
KINDS = {
    "number": (("statistic", "seeds", "choose"), ("lower",), ("value", "unit", "tolerance")),
    "equivalence": (("statistic", "seeds", "choose"), ("lower",), ("value", "unit", "tolerance")),
    "direction": (("statistic", "seeds", "choose", "test"), (), ("unit",)),
    "timing": (("statistic", "repetitions", "test"), ("lower",), ("unit",)),
    "statement": (("statistic", "cases"), (), ()),
    "fixed": (("verdict", "evidence"), ("statistic",), ()),
}
# how each field is read
READ = {
    **dict.fromkeys(("where", "statement", "unit", "why", "statistic", "evidence", "choose"), _text),
    **dict.fromkeys(("seeds", "cases", "repetitions"), _count),
    **dict.fromkeys(("test", "lower"), _test),
    "value": _value_or_values,
    "tolerance": partial(_number, least=0),
    "notebook": partial(_choice, allowed=NOTEBOOKS),
    "tier": partial(_choice, allowed=TIERS),
    "kind": partial(_choice, allowed=KINDS),
    "verdict": partial(_choice, allowed=FIXED),
}

READ_TIMING = READ | dict.fromkeys(("test", "lower"), partial(_test, required=(), optional=()))  # the range decides


def _claim(name: object, entry: object, papers: Collection[str], choose: Collection[str]) -> Claim:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", name):
        raise InputError("an id is lower-case words joined by dots, such as asa.skip.both")
    paper = _choice("paper", name.split(".")[0], papers)
    _fields("claim", entry, ("where", "statement", "notebook", "tier", "rule"), ("value", "unit", "tolerance", "why"))
    rule = _rule(entry["rule"], choose)
    needed = {*KINDS[rule.kind][2], *(("why",) if "tolerance" in entry else ())}
    for missing in sorted(needed - entry.keys()):
        raise InputError(f"claim with a {rule.kind} rule lacks {missing!r}")
    claim = Claim(name, paper, rule=rule, **{part: READ[part](part, entry[part]) for part in entry if part != "rule"})
    several = isinstance(claim.value, tuple) and len(claim.value) > 1 and "tolerance" in entry
    if several != (rule.verdict == DISAGREE):
        raise InputError(f"{DISAGREE!r} goes with a list of values and a tolerance, and nothing else does")
    return claim


def _rule(entry: object, choose: Collection[str]) -> Rule:
    if not isinstance(entry, dict) or "kind" not in entry:
        raise InputError("rule must be a block with 'kind'")
    required, optional, _ = KINDS[READ["kind"]("kind", entry["kind"])]
    _fields(f"{entry['kind']} rule", entry, ("kind", *required), optional)
    read = READ_TIMING if entry["kind"] == "timing" else READ
    rule = Rule(**{part: read[part](part, value) for part, value in entry.items()})
    if rule.choose:
        _choice("choose", rule.choose, choose)
    spread = rule.kind == "equivalence" or (rule.test is not None and rule.test.by_sd > 0)
    if spread and rule.seeds < 2:
        raise InputError("a rule that uses the spread needs seeds >= 2")
    if rule.test and rule.test.seeds:
        raise InputError("seeds belongs to the rule, not to its test")
    if rule.lower and rule.kind != "timing" and rule.lower.seeds < (2 if rule.lower.by_sd else 1):
        raise InputError("lower needs its own seeds, at least 2 where it uses the spread")
    return rule
