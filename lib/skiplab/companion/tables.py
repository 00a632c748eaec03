"""The ledger as tables: what the overview, the README and the site show."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from skiplab.companion import fingerprint
from skiplab.companion.claims import OURS, PAPER, THIRD_PARTY, Claim, choice, papers
from skiplab.companion.deciding import INCONCLUSIVE
from skiplab.companion.judging import NOT_RUN, NOT_TESTABLE, VERDICTS, plain
from skiplab.companion.ledger import verdicts

TITLES = {PAPER: "The paper's claims", OURS: "Ours about it", THIRD_PARTY: "A third party's"}


def table(notebook: str | None = None, folder: Path | None = None) -> pd.DataFrame:
    """Return the ledger, one row a claim, of one notebook or of all."""
    if notebook is not None:
        choice("notebook", notebook, fingerprint.notebooks())
    rows = [
        {
            "claim": verdict.claim.id,
            "statement": verdict.claim.statement,
            "whose": verdict.claim.whose,
            "claimed": _value(verdict.claim),
            "measured": verdict.measured,
            "n": verdict.n,
            "verdict": verdict.in_words,
            "group": verdict.group,
            "preset": verdict.preset,
            "notebook": verdict.claim.notebook,
            "detail": verdict.detail,
        }
        for verdict in verdicts(folder)
        if notebook in (None, verdict.claim.notebook)
    ]
    return pd.DataFrame(rows)


def markdown(notebook: str | None = None, folder: Path | None = None) -> str:
    """Return the ledger as Markdown: for each paper a table of its claims, of ours about it, and of third parties'.

    Claims that were not run are only counted.
    """
    rows = table(notebook, folder)
    columns = ["claim", "claimed", "measured", "n", "verdict", "preset", "detail"]
    parts = []
    for paper, citation in papers().items():
        mine = rows[rows["claim"].str.startswith(f"{paper}.")]
        if mine.empty:
            continue
        parts.append(f"## {citation}\n")
        for whose, title in TITLES.items():
            group = mine[mine["whose"] == whose]
            shown = group[(group["verdict"] != NOT_RUN) | (group["n"] > 0)]
            named = shown.assign(claim=shown["statement"] + " `" + shown["claim"] + "`")
            if len(shown):
                parts.append(f"### {title}\n\n{grid(columns, named[columns].itertuples(index=False))}")
            if len(group) > len(shown):
                parts.append(f"{title}, not run yet: {len(group) - len(shown)} of {len(group)}.\n")
    return "\n".join(parts)


def counts(folder: Path | None = None) -> str:
    """Return in Markdown how many claims of each paper, of ours and of third parties have which verdict."""
    rows = table(folder=folder)
    short = {name: text.split(". ")[-3].partition(":")[0] for name, text in papers().items()}
    paper = rows["claim"].str.partition(".")[0].map(short)
    found = rows.groupby(["whose", paper, "group"], sort=False).size().unstack(fill_value=0)
    seen = [verdict for verdict in VERDICTS if verdict in found]
    lines = [
        (TITLES[whose], name, *found.loc[whose, name][seen]) for whose in TITLES for name in found.loc[whose].index
    ]
    return grid(["whose", "paper", *seen], lines) + expected_errors(folder)


def expected_errors(folder: Path | None = None) -> str:
    """Say how many claims an interval decided, and how many of these chance alone would decide wrongly."""
    kinds = ("effect", "number", "equivalence", "share")
    decided = [
        verdict
        for verdict in verdicts(folder)
        if verdict.claim.rule.kind in kinds and verdict.verdict not in (NOT_RUN, NOT_TESTABLE, INCONCLUSIVE)
    ]
    return (
        f"An interval at 90 % decided {len(decided)} of these claims. Each is decided wrongly by chance in at most 5 % "
        f"of reruns at its margin, so at most about {round(0.05 * len(decided))} of them are.\n"
    )


def grid(columns: Sequence[str], rows: Iterable[tuple]) -> str:
    """Return a Markdown table, and an empty line."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def summary(folder: Path | None = None) -> dict[str, int]:
    """Return how many claims have each verdict."""
    found = [verdict.group for verdict in verdicts(folder)]
    return {verdict: found.count(verdict) for verdict in VERDICTS}


def _value(claim: Claim) -> str:
    if claim.value is None:
        return ""
    given = claim.value if isinstance(claim.value, tuple) else (claim.value,)
    return f"{' / '.join(plain(value, claim.unit) for value in given)} {claim.unit}"


def _cell(value: object) -> str:
    return str(value or "").replace("|", "\\|").replace("\n", " ")
