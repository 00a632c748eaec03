"""The ledger: what we measured of every claim, and the verdict that the claim's rule gives.

A notebook calls `record` once, in its check cell; `tables` shows what is stored. Verdicts are computed from the
measured values whenever they are read, so nobody can type one.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from reprlib import repr as short

from skiplab import files
from skiplab.companion.claims import TIERS, Claim, choice, claims, fields, notebooks
from skiplab.companion.judging import (
    NOT_RECORDED,
    NOT_RUN,
    NOT_TESTABLE,
    RANK,
    Measurement,
    Need,
    Verdict,
    judge,
    on_one,
)
from skiplab.errors import InputError, unknown

LEDGER = files.ROOT / "data" / "ledger"  # committed: the presets in TIERS, and replicate: quick with other seeds
SCRATCH = files.ROOT / "build" / "ledger"  # not committed: smoke, and custom (a run with changed parameters)
UNCOMMITTED = ("smoke", "custom")
SCHEMA = 3
COUNTED = ("statement", "share")  # kinds of rules about violations among cases


def record(
    measurements: Mapping[str, Measurement],
    needs: Mapping[str, Need] | None = None,
    *,
    notebook: str,
    preset: str,
    folder: Path | None = None,
) -> list[Verdict]:
    """Judge what a notebook measured and store it as `<preset>/<notebook>.json`, in place of what was there.

    The file is written whole or not at all, and belongs to this notebook and preset alone, so that jobs never collide.
    It goes to LEDGER, to SCRATCH for the presets smoke and custom, or to `folder`. Verdicts come in the order of
    data/claims.yaml. What stored runs measured carries their processors, anything else this machine's. Times measured
    on other processors stay beside the new ones. `needs` says whether needs are met of which a measurement says nothing
    itself. Raises InputError for an unknown claim, one of another notebook, or a malformed measurement.
    """
    choice("notebook", notebook, notebooks())
    choice("preset", preset, RANK)
    known = claims()
    measurements = {name: _with_needs(known.get(name), one, needs or {}) for name, one in measurements.items()}
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


def verdicts(folder: Path | None = None) -> list[Verdict]:
    """Return one verdict a claim, in the order of data/claims.yaml: that of the highest tier which says anything.

    An inconclusive run says something: a smaller one does not decide in its place. Runs that lack values or what the
    claim needs say nothing. Raises InputError where a file is damaged, or where its rule now gives another verdict than
    when it was run.
    """
    by_tier = [stored(preset, folder) for preset in TIERS]
    return [max((found[name] for found in by_tier), key=_weight) for name in by_tier[0]]


def _weight(verdict: Verdict) -> tuple[int, int]:
    """Rank verdicts on one claim: by whether they say anything, then by their tier."""
    silent = {NOT_RUN: 0, NOT_TESTABLE: 1}
    return silent.get(verdict.verdict, 2), TIERS.index(verdict.preset) + 1 if verdict.preset else 0


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


def _with_needs(claim: Claim | None, measurement: Measurement, needs: Mapping[str, Need]) -> Measurement:
    """Return a measurement that says of each of its claim's needs whether it is met."""
    if claim is None:
        return measurement
    said = {name: need for name, need in {**needs, **measurement.needs}.items() if name in claim.needs}
    return replace(measurement, needs=said)


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
    if claim.rule.kind not in COUNTED:
        if (violations, cases) != (None, None):
            raise InputError(f"{name} is no statement: give values, no violations and cases")
    elif violations is None or cases is None or not 0 <= violations <= cases or measurement.values:
        raise InputError(f"{name} counts cases: give 0 <= violations <= cases and no values")
    elif violations and not measurement.note and claim.rule.kind == "statement":
        raise InputError(f"{name} has violations: describe a counterexample in the note")
    if claim.rule.kind == "exact" and len(measurement.values) > 1:
        raise InputError(f"{name} is one number, not {len(measurement.values)}")
    if silent := [need for need in claim.needs if need not in measurement.needs]:
        raise InputError(f"{name} needs {', '.join(silent)}: say in `needs` whether that is met")


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

    That includes files of other schemas. A processor without a name is left out: it might be the one that measures now.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["claims"] if content["schema"] == SCHEMA else {}
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
    if measurement.needs:
        entry["needs"] = {name: asdict(need) for name, need in measurement.needs.items()}
    if measurement.cases is not None:
        return entry | {"violations": measurement.violations, "cases": measurement.cases}
    if verdict.claim.rule.kind == "timing":
        return entry | {
            "by_processor": {
                name: {"values": _words(values), "verdict": on_one(verdict.claim, values, verdict.preset)}
                for name, values in measurement.by_processor.items()
            }
        }
    return entry | {"values": _words(measurement.values)}


def _words(values: tuple[float, ...]) -> list[float | str]:
    """Write infinities, which JSON has not, as the words inf, -inf and nan, which float() reads."""
    return [value if math.isfinite(value) else str(value) for value in values]


def _measurement(entry: Mapping) -> Measurement:
    """Return what an entry of a file holds."""
    parts = {part: value for part, value in entry.items() if part not in ("verdict", "by_processor", "needs")}
    rows = {name: row["values"] for name, row in entry.get("by_processor", {}).items()}
    needs = {name: Need(**need) for name, need in entry.get("needs", {}).items()}
    return Measurement(**parts, by_processor=rows, needs=needs)


def _load(path: Path) -> list[Verdict]:
    """Read one file of the ledger and judge it anew."""
    notebook, preset = path.stem, path.parent.name
    known = claims()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("schema") != SCHEMA:
            raise InputError(f"its schema is {short(content.get('schema'))}, not {SCHEMA}")
        fields("file", content, ("schema", "notebook", "preset", "claims"))
        if (content["notebook"], content["preset"]) != (notebook, preset):
            raise InputError(f"it holds {short(content['notebook'])} in preset {short(content['preset'])}")
        result = []
        for name, entry in content["claims"].items():
            measured = ("values", "violations", "cases", "by_processor", "needs")
            fields(name, entry, ("verdict", "runs", "note", "processors"), measured)
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
        if old != verdict.verdict:
            raise InputError(
                f"{path}: rule of {verdict.claim.id} changed after the run: rerun {notebook} in preset {preset} "
                f"(stored: {short(old)}, by the rule of now: {verdict.verdict!r})"
            )
    return result
