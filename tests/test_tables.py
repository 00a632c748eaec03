"""The ledger as tables: by paper and by whose claim it is, with counts, and how many are wrong by chance."""

import re

import pytest

from skiplab.companion import claims, judging, ledger, tables
from skiplab.companion.judging import Measurement, Need
from skiplab.errors import InputError
from workflow import publish

SKIP, DROP, DIAGRAM = "01_skip_removal", "asa.skip.drop_no_sab", "asa.skip.phase_diagram"
NEEDS = {name: Need(True, "so") for name in claims.needs()}
MEASURED = {
    DROP: Measurement((-18.0, -20.0, -15.5)),
    "asa.skip.asymmetry": Measurement((-1.0, 1.0, 0.0)),
    "asa.skip.convmixer": Measurement((5.0, 5.0, 5.0)),
    "asa.skip.none_worst": Measurement((-5.0, -5.0, -5.0), needs={"learnt": Need(False, "12 % of 50 %")}),
    "asa.skip.both": Measurement((80.0, 81.0, 82.0), note="a | b"),
    DIAGRAM: Measurement(violations=1, cases=6, note="depth 12"),
}


@pytest.fixture
def folder(tmp_path):
    """A ledger with one notebook's results at quick."""
    ledger.record(MEASURED, NEEDS, notebook=SKIP, preset="quick", folder=tmp_path)
    return tmp_path


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def parse(text):
    """Return a Markdown table as rows by column."""
    head, _, *rows = [cells(line) for line in text.strip().splitlines() if line.startswith("|")]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_row_says_what_is_claimed_measured_and_decided(folder):
    row = tables.table(folder=folder).set_index("claim").loc
    columns = ["claimed", "measured", "n", "verdict", "preset"]
    assert row[DROP][columns].tolist() == [
        "-22.0 points",
        "-17.8 (-21.6 to -14.0) points",
        3,
        "direction only",
        "quick",
    ]
    assert row["asa.skip.convmixer"]["verdict"] == "opposite here"
    why = {
        "asa.skip.asymmetry": ("inconclusive", "any effect is smaller than 10, the least of interest"),
        "asa.skip.none_worst": ("not testable here", "needs learnt: 12 % of 50 %"),
    }
    assert {name: tuple(row[name][["verdict", "detail"]]) for name in why} == why
    assert row["cut.dino.voc.single.skips"]["claimed"] == "56.3 / 63.3 % mIoU"
    assert row["cut.dino.pca"][["claimed", "measured", "n", "verdict"]].tolist() == ["", "", 0, "vague"]
    assert list(tables.table(folder=folder)["claim"]) == list(claims.claims())


def test_the_table_of_a_notebook_holds_its_claims_and_no_others(folder):
    own = [name for name, claim in claims.claims().items() if claim.notebook == SKIP]
    assert list(tables.table(SKIP, folder)["claim"]) == own
    text = tables.markdown(SKIP, folder)
    assert len(re.findall(r"^## ", text, re.M)) == 1 and "Cutting" not in text
    with pytest.raises(InputError, match="did you mean '01_skip_removal'"):
        tables.table("01_skip_remova")


def test_each_paper_has_a_table_of_its_own_claims_of_ours_and_of_third_parties(folder):
    parts = re.split(r"^## ", tables.markdown(folder=folder), flags=re.M)[1:]
    assert [part.splitlines()[0] for part in parts] == list(claims.papers().values())
    titles = re.split(r"^### ", parts[0], flags=re.M)[1:]
    shown = {part.splitlines()[0]: [row["claim"] for row in parse(part)] for part in titles}
    for title, rows in shown.items():
        whose = next(whose for whose, name in tables.TITLES.items() if name == title)
        ids = [re.search(r"`(\S+)`$", row)[1] for row in rows]
        assert ids and all(claims.claims()[name].whose == whose for name in ids)
        assert (DROP in ids) == (whose == "paper") and (DIAGRAM in ids) == (whose == "ours")
    assert "### A third party's" not in parts[0] and "A third party's, not run yet: 12 of 12." in parts[2]


def test_what_was_not_run_is_counted_and_not_listed(folder):
    text = tables.markdown(SKIP, folder)
    listed = [
        re.search(r"`(\S+)`$", row["claim"])[1]
        for row in parse(text)
        if row["claim"] != "claim" and "`" in row["claim"]
    ]
    assert set(listed) == set(MEASURED)
    own = [claim for claim in claims.claims().values() if claim.notebook == SKIP and claim.whose == "paper"]
    assert f"The paper's claims, not run yet: {len(own) - 4} of {len(own)}." in text
    assert "asa.skip.both" in text  # measured, though nothing decides it at quick


def test_a_bar_in_a_note_does_not_end_a_cell(folder):
    row = next(row for row in parse(tables.markdown(SKIP, folder)) if "asa.skip.both" in row["claim"])
    assert "a \\| b" in row["detail"]


def test_a_statement_of_ours_is_false_and_not_false_in_the_form_of_sources(tmp_path):
    wrong = Measurement(violations=1, cases=200, note="X = 0")
    names = ["asa.prop41.as_stated", "asa.prop41.repaired"]
    ledger.record(dict.fromkeys(names, wrong), notebook="04_bounds", preset="quick", folder=tmp_path)
    row = tables.table(folder=tmp_path).set_index("claim").loc
    assert row[names[0]]["verdict"] == "false in the form our sources give" and row[names[1]]["verdict"] == "false"


def test_counts_add_up_to_all_claims_by_paper_and_whose(folder):
    text = tables.counts(folder)
    rows = parse(text)
    known = claims.claims().values()
    titles = {
        "asa": "Always Skip Attention",
        "anti": "Anti-Oversmoothing in Deep Vision Transformers via the Fourier Domain Analysis",
        "cut": "Cutting the Skip",
    }
    kinds = {(tables.TITLES[claim.whose], titles[claim.paper]) for claim in known}
    assert {(row["whose"], row["paper"]) for row in rows} == kinds and len(rows) == len(kinds)
    numbers = {key: sum(int(row[key] or 0) for row in rows) for key in rows[0] if key not in ("whose", "paper")}
    assert sum(numbers.values()) == len(known)
    expected = {verdict: count for verdict, count in tables.summary(folder).items() if count}
    assert numbers == expected
    assert (numbers["direction only"], numbers["opposite here"], numbers["inconclusive"]) == (1, 2, 1)


def test_the_errors_to_expect_are_one_in_twenty_of_what_intervals_decided(tmp_path, folder):
    said = "An interval at 90 % decided {} of these claims. .* so at most about {} of them are"
    assert re.search(said.format(2, 0), tables.counts(folder))  # not the statement, the inconclusive and the untestable
    low_pass = [one for one in claims.claims().values() if one.notebook == "03_low_pass" and one.rule.kind == "effect"]
    measured = {one.id: Measurement((1e6,) * 8) for one in low_pass}
    ledger.record(measured, NEEDS, notebook="03_low_pass", preset="quick", folder=tmp_path)
    count = len(low_pass) + 2
    assert count > 15 and re.search(said.format(count, round(count / 20)), tables.counts(tmp_path))


def test_the_summary_knows_every_verdict(folder):
    assert list(tables.summary(folder)) == list(judging.VERDICTS)
    assert sum(tables.summary(folder).values()) == len(claims.claims())


def test_the_pages_are_those_tables(folder, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", folder)
    text = publish._current_ledger()
    assert text.startswith("# The ledger\n") and text.endswith(tables.markdown()) and "(-21.6 to -14.0)" in text
