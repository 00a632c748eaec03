"""A rerun with other seeds: which seeds it takes, and when its verdicts agree with or contradict the published ones."""

import dataclasses
import re

import pytest

from skiplab.companion import claims, fingerprint, judging, ledger, params, replication
from skiplab.companion.judging import Measurement, Need
from skiplab.errors import InputError
from workflow import costs

NOTEBOOKS = fingerprint.notebooks()
SEEDED = [name for name in NOTEBOOKS if name != fingerprint.OVERVIEW]

# --- The preset -------------------------------------------------------------------------------------------------------


def seeds_of(values):
    return {
        seed
        for name, value in values.items()
        if re.search("seed", name)
        for seed in (value if isinstance(value, list) else [value])
    }


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_rerun_changes_all_seeds_and_nothing_else(notebook):
    declared = params.stored_declarations(notebook)
    defaults = {name: declaration.default for name, declaration in declared.items()}
    values = params.preset_values(notebook, "replicate", declared)
    assert {name for name in defaults if "seed" in name} == set(values)
    assert not seeds_of(defaults) & seeds_of(values)
    assert bool(values) == (notebook in SEEDED)
    for name, value in values.items():
        assert type(value) is type(defaults[name])
        assert not isinstance(value, list) or len(value) == len(defaults[name])


def configurations(notebook, preset):
    """Return the configurations of a preset's runs without what its seeds decide."""
    found = [dataclasses.asdict(config) for _, config in costs.configurations(notebook, preset).values()]
    seeds = {config["seed"] for config in found}
    return seeds, sorted(repr(config | {"seed": 0, "initial": bool(config.get("initial"))}) for config in found)


@pytest.mark.parametrize("notebook", SEEDED)
def test_its_experiments_differ_from_the_published_ones_in_their_seeds_only(notebook, store):
    (seeds, quick), (others, again) = (configurations(notebook, preset) for preset in ("quick", "replicate"))
    assert quick == again and quick and not seeds & others


def test_only_the_workflow_makes_it_a_result(monkeypatch):
    declared = params.stored_declarations("01_skip_removal")
    values = {name: one.default for name, one in declared.items()} | params.other_seeds(declared)
    monkeypatch.delenv(params.WORKFLOW_VARIABLE, raising=False)
    assert params._preset_of(values, "01_skip_removal", {}) == "custom"
    monkeypatch.setenv(params.WORKFLOW_VARIABLE, "1")
    assert params._preset_of(values, "01_skip_removal", {}) == "replicate"


def test_seeds_that_would_meet_are_refused_in_one_line():
    declared = params.declarations("seeds: list[int] = [0, 1000]\ndraws_seed: int = 5\nseedling: int = 3")
    with pytest.raises(InputError, match="adds 1000 to every seed, and 1000 is one already; .* such as 999"):
        params.other_seeds(declared)
    declared["seeds"] = params.Declaration("list[int]", [0, 999])
    assert params.other_seeds(declared) == {"seeds": [1000, 1999], "draws_seed": 1005}


# --- The comparison ---------------------------------------------------------------------------------------------------

DROP, SAME, DIAGRAM = "asa.skip.drop_no_sab", "asa.skip.convmixer", "asa.skip.phase_diagram"
LOW, HIGH, BOTH, FEW = (-18.0, -20.0, -16.0), (3.0, 1.0, 2.0), (-30.0, 0.0, 20.0), (-18.0,)
NONE, SOME = Measurement(violations=0, cases=9), Measurement(violations=2, cases=9, note="depth 2")
NEEDS = {name: Need(True, "so") for name in claims.needs()}
UNMET = Measurement(LOW, needs={"learnt": Need(False, "12 % of 50 %")})
FALSE = "anti.cor2.stochastic"


def pairs(folder, name, published, again):
    for preset, measured in (("quick", published), ("replicate", again)):
        one = measured if isinstance(measured, Measurement) else Measurement(measured)
        notebook = claims.claims()[name].notebook
        ledger.record({name: one}, NEEDS, notebook=notebook, preset=preset, folder=folder)
    return {pair.published.claim.id: pair for pair in replication.compare(folder)}


@pytest.mark.parametrize(
    ("name", "published", "again", "outcome"),
    [
        (DROP, LOW, LOW, "agree"),
        (DROP, HIGH, HIGH, "agree"),
        (DROP, LOW, HIGH, "contradict each other"),
        (DROP, HIGH, LOW, "contradict each other"),
        (DROP, LOW, FEW, "decided on one side only"),
        (DROP, LOW, BOTH, "decided on one side only"),  # an inconclusive run takes no side
        (DROP, UNMET, HIGH, "decided on one side only"),  # nor does one that lacks what the claim needs
        (DROP, FEW, HIGH, "decided on one side only"),
        (DROP, FEW, FEW, "decided on neither side"),
        (DROP, BOTH, UNMET, "decided on neither side"),
        (SAME, (0.1, 0.2, 0.3), (9.0, 9.1, 9.2), "contradict each other"),
        (DIAGRAM, NONE, NONE, "agree"),
        (DIAGRAM, SOME, SOME, "agree"),
        (DIAGRAM, NONE, SOME, "contradict each other"),
        (
            FALSE,
            Measurement(violations=0, cases=200),
            Measurement(violations=1, cases=9, note="X"),
            "contradict each other",
        ),
        (FALSE, Measurement(violations=1, cases=9, note="X"), Measurement(violations=2, cases=9, note="Y"), "agree"),
        ("asa.time.cpu.vit", (3.0,) * 3, (1.0,) * 3, "about times, not compared"),
        ("asa.tg.gain_range", (0.1,), (0.9,), "agree"),  # its verdict is fixed
    ],
)
def test_what_agrees_and_what_contradicts(tmp_path, name, published, again, outcome):
    found = pairs(tmp_path, name, published, again)
    assert found[name].outcome == outcome and set(found) == set(claims.claims())
    counted = dict(re.findall(r"^\| ([a-z, ]+) \| (\d+) \|$", replication.report(list(found.values())), re.M))
    assert sum(map(int, counted.values())) == len(found) and set(counted) == set(replication.OUTCOMES)
    line = replication.contradictions(list(found.values()))
    assert bool(line) == (outcome == "contradict each other") == (name in line) and "\n" not in line
    assert (name in replication.section(tmp_path)) == (outcome in ("contradict each other", "decided on one side only"))


def test_a_contradiction_is_named_with_both_verdicts_and_values(tmp_path):
    line = replication.contradictions(list(pairs(tmp_path, DROP, LOW, HIGH).values()))
    assert line.endswith(
        f"contradicted by other seeds: {DROP}: direction only (-18.0 (-21.4 to -14.6) points) in quick, "
        "opposite here (+2.0 (+0.3 to +3.7) points) with other seeds"
    )


def test_the_published_ledger_does_not_show_the_rerun(tmp_path):
    pairs(tmp_path, DROP, LOW, HIGH)
    assert {one.claim.id: one.preset for one in ledger.verdicts(tmp_path)}[DROP] == "quick"


def test_the_readme_says_what_is_missing_or_unreadable(tmp_path):
    assert replication.section(tmp_path) == (
        "Processors on which quick's values were computed: none yet.\n\nNo run with other seeds is stored yet.\n"
    )
    with pytest.raises(InputError, match="no results of preset quick in .*: run make reproduce"):
        replication.compare(tmp_path)
    pairs(tmp_path, DROP, LOW, LOW)
    assert re.search(r"^Those of the run with other seeds: .+ \(1 claims\)\.$", replication.section(tmp_path), re.M)
    (tmp_path / "replicate" / "01_skip_removal.json").write_text("{")
    assert "damaged or was judged by other rules" in replication.section(tmp_path)
    with pytest.raises(InputError, match="rerun 01_skip_removal in preset replicate"):
        replication.compare(tmp_path)


def test_every_verdict_takes_a_side_or_says_why_it_takes_none():
    neither = {judging.INCONCLUSIVE, judging.NOT_TESTABLE, judging.NOT_RUN}
    compared = set(judging.VERDICTS) - {judging.TIMED, *claims.FIXED}
    assert compared == set(replication.SIDES) | neither and not neither & set(replication.SIDES)
