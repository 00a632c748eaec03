"""The ledger's files: whole or nothing, many writers, damaged content, and times beside the processors they are of."""

import dataclasses
import json
import math
import multiprocessing
import os
import re

import pytest

from skiplab import files
from skiplab.companion import claims, judging, ledger, provenance, tables
from skiplab.companion.judging import Measurement, Need
from skiplab.errors import InputError
from skiplab.files import StorageError

SKIP, DROP, DIAGRAM = "01_skip_removal", "asa.skip.drop_no_sab", "asa.skip.phase_diagram"
NEEDS = {name: Need(True, "so") for name in claims.needs()}
MEASURED = {
    DROP: Measurement((-18, -20, -15.5), ("abc", "def"), "as expected"),
    "asa.skip.divergence_epoch": Measurement((3, math.inf, math.nan)),
    DIAGRAM: Measurement(violations=1, cases=6, note="depth 12 | 3e-4"),
    "asa.skip.diverges": Measurement(violations=5, cases=5),
}


def record(folder, measured=MEASURED, notebook=SKIP, preset="quick", needs=NEEDS):
    return ledger.record(measured, needs, notebook=notebook, preset=preset, folder=folder)


def shown(folder, name):
    """Return the verdict that readers see, and of which preset."""
    verdict = {one.claim.id: one for one in ledger.verdicts(folder)}[name]
    return verdict.verdict, verdict.preset


# --- Recording --------------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_read_back(tmp_path):
    recorded = {verdict.claim.id: verdict for verdict in record(tmp_path)}
    assert list(recorded) == [name for name in claims.claims() if name in MEASURED]
    read = {verdict.claim.id: verdict for verdict in ledger.verdicts(tmp_path)}
    whole = lambda one: (str(one), one.preset, str(one.measurement))  # noqa: E731  nan equals nothing
    assert {name: whole(read[name]) for name in MEASURED} == {name: whole(one) for name, one in recorded.items()}
    assert set(read) == set(claims.claims())
    assert (read["asa.skip.both"].verdict, read["cut.dino.pca"].verdict) == (judging.NOT_RUN, "vague")


def test_the_same_measurement_gives_the_same_bytes(tmp_path):
    record(tmp_path / "a")
    record(tmp_path / "b", dict(reversed(MEASURED.items())))
    first, second = (tmp_path / part / "quick" / f"{SKIP}.json" for part in "ab")
    assert first.read_bytes() == second.read_bytes()
    json.loads(first.read_text(), parse_constant=pytest.fail)  # strict JSON: no bare NaN or Infinity


def test_needs_are_stored_with_the_claims_that_have_them_and_a_measurements_own_come_first(tmp_path):
    own = dataclasses.replace(MEASURED[DROP], needs={"learnt": Need(False, "its own")})
    record(tmp_path, {DROP: own, "asa.skip.both": Measurement((1.0,)), DIAGRAM: MEASURED[DIAGRAM]})
    entries = json.loads((tmp_path / "quick" / f"{SKIP}.json").read_text())["claims"]
    assert entries[DROP]["needs"] == {"learnt": {"met": False, "found": "its own"}}
    assert (
        entries[DIAGRAM]["needs"] == {"learnt": {"met": True, "found": "so"}}
        and "needs" not in entries["asa.skip.both"]
    )
    assert shown(tmp_path, DROP) == (judging.NOT_TESTABLE, "quick")


def test_the_highest_tier_that_says_anything_is_shown(tmp_path):
    few, unmet = Measurement((-22.0,)), NEEDS | {"learnt": Need(False, "no")}
    record(tmp_path, {DROP: few}, preset="paper")
    assert shown(tmp_path, DROP) == ("not run", "paper")
    record(tmp_path, {DROP: Measurement((-22.0,) * 3)}, preset="gpu", needs=unmet)
    assert shown(tmp_path, DROP) == ("not testable here", "gpu")
    record(tmp_path)
    assert shown(tmp_path, DROP) == ("direction only", "quick")  # neither of those says anything
    record(tmp_path, {DROP: Measurement((-22.0, -40.0, 0.0))}, preset="gpu")
    assert shown(tmp_path, DROP) == ("inconclusive", "gpu")  # and quick does not decide in its place
    record(tmp_path, {DROP: Measurement((-3.0,) * 3)}, preset="paper")
    assert shown(tmp_path, DROP) == ("not reproduced", "paper")


def test_smoke_and_custom_runs_never_touch_the_committed_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger")
    monkeypatch.setattr(ledger, "SCRATCH", tmp_path / "scratch")
    for preset in judging.RANK:
        record(None, preset=preset)
    written = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    committed = {f"ledger/{preset}" for preset in ("quick", "replicate", "gpu", "paper")}
    assert written == committed | {"scratch/smoke", "scratch/custom"}


def test_the_committed_ledger_agrees_with_the_rules():
    assert ledger.verdicts()


@pytest.mark.parametrize(
    ("measured", "notebook", "preset", "message"),
    [
        ({"asa.skip.no_sba": Measurement()}, SKIP, "quick", "'asa.skip.no_sba'; did you mean 'asa.skip.no_sab'?"),
        ({"asa.skip.both": Measurement()}, "04_bounds", "quick", "asa.skip.both belongs to notebook 01_skip_removal"),
        ({}, "01_skip_removl", "quick", "unknown notebook '01_skip_removl'; did you mean '01_skip_removal'?"),
        ({}, SKIP, "quik", "unknown preset 'quik'; did you mean 'quick'?"),
        ({DIAGRAM: Measurement((1.0,))}, SKIP, "quick", "counts cases: give 0 <= violations <= cases and no values"),
        ({DIAGRAM: Measurement(violations=3, cases=2)}, SKIP, "quick", "violations <= cases"),
        ({DIAGRAM: Measurement(violations=1, cases=2)}, SKIP, "quick", "describe a counterexample"),
        ({"asa.skip.diverges": Measurement((1.0,) * 5)}, SKIP, "quick", "counts cases"),
        ({"asa.skip.both": Measurement(violations=0, cases=2)}, SKIP, "quick", "is no statement: give values"),
        ({"anti.thm1.one_step": Measurement((2.8, 2.7))}, "04_bounds", "quick", "is one number, not 2"),
    ],
)  # fmt: skip
def test_a_wrong_recording_is_refused_and_writes_nothing(tmp_path, measured, notebook, preset, message):
    with pytest.raises(InputError, match=re.escape(message)):
        record(tmp_path, measured, notebook, preset)
    assert not list(tmp_path.iterdir())


def test_a_claim_whose_needs_nobody_speaks_of_is_not_recorded(tmp_path):
    said = {"learnt": Need(True, "so")}
    with pytest.raises(InputError, match="asa.skip.asymmetry needs off_floor: say in `needs` whether that is met"):
        record(tmp_path, {"asa.skip.asymmetry": Measurement((1.0,) * 3)}, needs=said)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    record(tmp_path)
    folder = tmp_path / "quick"
    before = (folder / f"{SKIP}.json").read_bytes()
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(StorageError, match="No space left on device"):
                record(tmp_path, {})
        assert [path.name for path in folder.iterdir()] == [f"{SKIP}.json"]
        assert (folder / f"{SKIP}.json").read_bytes() == before


WRITERS = sorted({claim.notebook for claim in claims.claims().values()})


def _write_often(folder, notebook, preset):
    names = [claim.id for claim in claims.claims().values() if claim.notebook == notebook and claim.rule.seeds]
    for count in range(20):
        record(folder, {name: Measurement((count % 3,) * 9) for name in names}, notebook, preset)


def test_many_jobs_at_once_never_mix(tmp_path):
    fork = multiprocessing.get_context("fork")
    jobs = [
        fork.Process(target=_write_often, args=(tmp_path, notebook, preset))
        for notebook in WRITERS
        for preset in ("quick", "gpu")
    ]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        ledger.verdicts(tmp_path)  # a reader meets whole files only
    assert [job.exitcode for job in jobs] == [0] * len(jobs)
    assert len(list(tmp_path.rglob("*"))) == 2 + len(jobs)
    assert sum(one.n > 0 for one in ledger.verdicts(tmp_path)) > 100


# --- Damaged files ----------------------------------------------------------------------------------------------------


def _edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema=2), "its schema is 2, not 3"),
        (lambda c: c.pop("notebook"), "lacks 'notebook'"),
        (lambda c: c.update(preset="gpu"), "holds '01_skip_removal' in preset 'gpu'"),
        (lambda c: c.update(claims=[]), "is damaged"),
        (lambda c: c.update(extra=1), "unknown field of file 'extra'"),
        (lambda c: c["claims"].update({"asa.skip.gone": c["claims"][DROP]}), "unknown claim"),
        (lambda c: c["claims"][DROP].pop("runs"), "lacks 'runs'"),
        (lambda c: c["claims"][DROP].pop("processors"), "lacks 'processors'"),
        (lambda c: c["claims"][DROP].update(by_processor={"A": {"values": [1]}}), "has by_processor"),
        (lambda c: c["claims"][DROP].update(by_processor={"A": {}}), "is damaged"),
        (lambda c: c["claims"][DROP].update(by_processor=[1]), "is damaged"),
        (lambda c: c["claims"][DROP].update(values="80"), "values, runs and processors are tuples"),
        (lambda c: c["claims"][DROP].update(values=["many"]), "is damaged"),
        (lambda c: c["claims"][DROP].pop("needs"), "needs learnt: say in `needs` whether that is met"),
        (lambda c: c["claims"][DROP].update(needs={"learnt": True}), "is damaged"),
        (lambda c: c["claims"][DROP]["needs"]["learnt"].update(met="no"), "a need is met or not"),
        (lambda c: c["claims"][DIAGRAM].update(cases=0), "violations <= cases"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, change, message):
    record(tmp_path)
    _edit(tmp_path / "quick" / f"{SKIP}.json", change)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        ledger.verdicts(tmp_path)
    text = str(caught.value)
    assert f"quick/{SKIP}.json" in text and f"rerun {SKIP} in preset quick" in text and "\n" not in text


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 3}',
    b'{"schema": 3, "notebook": 1, "preset": 1, "claims": [1]}', b"[" * 100_000])  # fmt: skip
def test_a_file_of_nonsense_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / f"{SKIP}.json").write_bytes(content)
    with pytest.raises(InputError, match="delete it and rerun 01_skip_removal in preset quick") as caught:
        ledger.verdicts(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_typed_verdict_or_a_changed_rule_is_refused(tmp_path, monkeypatch):
    record(tmp_path)
    path = tmp_path / "quick" / f"{SKIP}.json"
    whole = path.read_text()
    _edit(path, lambda content: content["claims"][DROP].update(verdict="reproduced"))
    with pytest.raises(InputError, match=f"rule of {DROP} changed after the run: rerun"):
        ledger.verdicts(tmp_path)
    path.write_text(whole)
    text = claims.CLAIMS.read_text(encoding="utf-8")
    changed = claims._parse(text.replace("lower: {below: 0, most: 44", "lower: {below: -21, least: 0, most: 44")).claims
    assert changed != claims.claims()
    monkeypatch.setattr(ledger, "claims", lambda: changed)
    with pytest.raises(InputError, match=f"rule of {DROP} changed after the run: rerun"):
        ledger.verdicts(tmp_path)


# --- Times and processors ---------------------------------------------------------------------------------------------

TIME = "asa.time.cpu.vit"
SPEED = claims.Rule("timing", repetitions=3, test=claims.Test("above", 2.0))


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Return a function that records times as if on the processor it is given, where the rule is one of times."""
    monkeypatch.setattr(
        ledger,
        "claims",
        lambda known=claims.claims(): known | {TIME: dataclasses.replace(known[TIME], rule=SPEED)},
    )

    def record_on(processor, *values, **changes):
        monkeypatch.setattr(provenance, "machine", lambda device: {"device_name": processor})
        measured = {TIME: Measurement(values, **changes), "asa.tg.dct_order": Measurement((30.0,) * 8)}
        return ledger.record(measured, notebook="02_token_graying", preset="quick", folder=tmp_path)

    return record_on


def times(folder):
    return json.loads((folder / "quick" / "02_token_graying.json").read_text())["claims"][TIME]


def test_another_processor_adds_a_row_and_the_same_one_replaces_its_own(tmp_path, on):
    assert str(on("B", 1.0, 1.1, 1.2)[-1]) == f"{TIME}: holds on 0 of 1 processor (1 to 1.2 ×; B: does not hold)"
    on("A", 2.1, 2.2, 2.3)
    stored = ledger.stored("quick", tmp_path)[TIME]
    assert stored.verdict == "holds on 1 of 2 processors" and stored.n == 6 and stored.group == judging.TIMED
    assert stored.detail == "A: holds; B: does not hold" and stored.measured == "2.1 to 2.3 / 1 to 1.2 ×"
    assert times(tmp_path)["by_processor"]["B"] == {"values": [1.0, 1.1, 1.2], "verdict": "does not hold"}
    first = (tmp_path / "quick" / "02_token_graying.json").read_bytes()
    on("A", 2.1, 2.2, 2.3)
    assert (tmp_path / "quick" / "02_token_graying.json").read_bytes() == first
    on("B", 2.5, 2.6, 2.7)
    assert times(tmp_path)["verdict"] == "holds on 2 of 2 processors" and times(tmp_path)["processors"] == ["A", "B"]
    assert ledger.processors("quick", tmp_path) == {"A": 1, "B": 2}
    assert tables.summary(tmp_path)[judging.TIMED] == 1


def test_a_gpu_is_named_by_whoever_measured_on_it(tmp_path, on):
    on("A", 2.1, 2.2, 2.3, processors=("H200",))
    assert list(times(tmp_path)["by_processor"]) == times(tmp_path)["processors"] == ["H200"]


def test_a_file_that_is_damaged_or_of_another_schema_is_replaced_and_its_rows_are_gone(tmp_path, on):
    on("A", 2.1, 2.2, 2.3)
    path = tmp_path / "quick" / "02_token_graying.json"
    old = path.read_text().replace('"schema": 3', '"schema": 2')
    for content in ("{", "[]", '{"schema": 3}', '{"schema": 3, "claims": {"a": 1}}', old):
        path.write_text(content)
        on("B", 1.0, 1.1, 1.2)
        assert list(times(tmp_path)["by_processor"]) == ["B"]


def test_a_changed_rule_of_times_is_refused(tmp_path, on):
    on("A", 2.1, 2.2, 2.3)
    _edit(tmp_path / "quick" / "02_token_graying.json", lambda c: c["claims"][TIME].update(verdict="reproduced"))
    with pytest.raises(InputError, match=f"rule of {TIME} changed after the run: rerun 02_token_graying"):
        ledger.verdicts(tmp_path)


def test_a_processor_without_a_name_is_not_kept_beside_one_that_may_be_the_same(tmp_path, on):
    on("A", 2.1, 2.2, 2.3, processors=("not recorded",))
    assert list(times(tmp_path)["by_processor"]) == ["not recorded"]
    on("B", 1.0, 1.1, 1.2)
    assert list(times(tmp_path)["by_processor"]) == ["B"]


def test_stored_runs_bring_their_processors(tmp_path, on, monkeypatch):
    monkeypatch.setenv("COMPANION_RUNS", str(tmp_path / "runs"))
    for name, processor in (("abc", "C"), ("def", "B"), ("other", "D")):
        files.write(
            tmp_path / "runs" / "train" / name / "provenance.json", json.dumps({"machine": {"device_name": processor}})
        )
    on("A")
    record(
        tmp_path,
        {
            "asa.skip.both": Measurement((1.0,), ("abc", "def")),
            "asa.skip.no_ffn": Measurement((1.0,)),
            "asa.skip.no_sab": Measurement((1.0,), ("gone",)),
        },
    )
    found = {name: one.measurement.processors for name, one in ledger.stored("quick", tmp_path).items()}
    assert found["asa.skip.both"] == ("B", "C") and found["asa.skip.no_ffn"] == ("A",)
    assert found["asa.skip.no_sab"] == ("not recorded",)
