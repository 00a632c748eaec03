"""Whether a rerun overturns a verdict: the quick experiments with other seeds, preset replicate, beside the published.

Two runs contradict each other where one says that a claim holds and the other that it does not. A claim decided by one
run only is no contradiction; an inconclusive run, and one that lacks what the claim needs, decide nothing. Times are
left out: they speak of a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skiplab.companion import judging, ledger
from skiplab.companion.judging import Verdict
from skiplab.companion.tables import grid
from skiplab.errors import InputError

AGREE, ONE_SIDED, CONTRADICT = "agree", "decided on one side only", "contradict each other"
NEITHER, TIMED = "decided on neither side", "about times, not compared"
OUTCOMES = (AGREE, ONE_SIDED, CONTRADICT, NEITHER, TIMED)
SIDES = dict.fromkeys((judging.REPRODUCED, judging.DIRECTION_ONLY), True)
SIDES |= dict.fromkeys((judging.NOT_REPRODUCED, judging.OPPOSITE, judging.FALSE), False)
COLUMNS = ("claim", "quick", "with other seeds")


@dataclass(frozen=True)
class Pair:
    """The published verdict on a claim, and that of the run with other seeds."""

    published: Verdict
    again: Verdict

    @property
    def outcome(self) -> str:
        """Return which of OUTCOMES it is."""
        rule = self.published.claim.rule
        if rule.kind in ("fixed", "timing"):
            return AGREE if rule.kind == "fixed" else TIMED
        sides = [SIDES.get(verdict.verdict) for verdict in (self.published, self.again)]
        if None in sides:
            return NEITHER if sides == [None, None] else ONE_SIDED
        return AGREE if sides[0] == sides[1] else CONTRADICT

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the claim's id, and each side's verdict and value in words."""
        both = (
            f"{verdict.in_words} ({verdict.measured})" if verdict.measured else verdict.in_words
            for verdict in (self.published, self.again)
        )
        return (self.published.claim.id, *both)


def compare(folder: Path | None = None) -> list[Pair]:
    """Return every claim's pair of verdicts. Raises InputError where a run is missing or its file is damaged."""
    folder = folder or ledger.LEDGER
    for preset, command in (("quick", "reproduce"), ("replicate", "replicate")):
        if not list((folder / preset).glob("*.json")):
            raise InputError(f"there are no results of preset {preset} in {folder / preset}: run make {command}")
    published, again = (ledger.stored(preset, folder) for preset in ("quick", "replicate"))
    return [Pair(verdict, again[name]) for name, verdict in published.items()]


def report(pairs: Sequence[Pair]) -> str:
    """Return in Markdown how many claims have which outcome, and those decided otherwise or on one side only."""
    outcomes = [pair.outcome for pair in pairs]
    parts = [grid(("claims that", "number"), [(outcome, str(outcomes.count(outcome))) for outcome in OUTCOMES])]
    for outcome in (CONTRADICT, ONE_SIDED):
        if outcome in outcomes:
            rows = [pair.row for pair in pairs if pair.outcome == outcome]
            parts.append(f"Claims that {'are ' if outcome == ONE_SIDED else ''}{outcome}:\n\n{grid(COLUMNS, rows)}")
    return "".join(parts)


def contradictions(pairs: Sequence[Pair]) -> str:
    """Return one line that names each contradiction with both verdicts and values; empty where there is none."""
    found = [pair.row for pair in pairs if pair.outcome == CONTRADICT]
    said = "; ".join(f"{name}: {published} in quick, {again} with other seeds" for name, published, again in found)
    return f"{len(found)} of {len(pairs)} verdicts are contradicted by other seeds: {said}" if found else ""


def section(folder: Path | None = None) -> str:
    """Return the README's part on reruns, and on which processors quick has been run."""
    folder = folder or ledger.LEDGER
    where = [f"{name} ({count} claims)" for name, count in ledger.processors("quick", folder).items()]
    text = f"Processors on which quick's values were computed: {', '.join(where) or 'none yet'}.\n\n"
    if not list((folder / "replicate").glob("*.json")):
        return text + "No run with other seeds is stored yet.\n"
    try:
        where = [f"{name} ({count} claims)" for name, count in ledger.processors("replicate", folder).items()]
    except InputError:  # `compare` says more; publishing quick does not fail for it
        return text + "The stored run with other seeds is damaged or was judged by other rules: make it again.\n"
    return f"{text}Those of the run with other seeds: {', '.join(where)}.\n\n{report(compare(folder)).rstrip()}\n"
