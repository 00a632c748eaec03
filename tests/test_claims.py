"""data/claims.yaml: every number of the papers is there, its rules keep their own word, and it is read strictly."""

import itertools
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skiplab.companion import claims, fingerprint, judging, params
from skiplab.companion.judging import Measurement, Need
from skiplab.errors import InputError

# Every number of the papers' tables and text, and of ours about them, typed here a second time.
NUMBERS = {
    "asa.skip.both": 92, "asa.skip.no_ffn": 90, "asa.skip.no_sab": 70, "asa.skip.divergence_epoch": 30,
    "asa.skip.convmixer": 0, "asa.kappa.sab": 6, "asa.kappa.sab_plus_input": 3, "asa.kappa.ffn": 3,
    "asa.prop41.gaussian_draws": 0, "asa.prop41.orthogonal_draws": 58.6, "asa.ffn.gaussian_draws": 82.4,
    "asa.ffn.orthonormal_draws": 100, "asa.prop42.gaussian_draws": 50,
    "asa.time.plain.days": 0.723, "asa.time.svd.days": 4.552, "asa.time.dct.days": 0.732,
    "asa.time.svd.ratio": 6.3, "asa.time.dct.ratio": 1.012,
    "asa.time.cpu.vit": 2.2, "asa.time.cpu.cifar": 1.3, "asa.time.cpu.swin": 1.9,
    "asa.tg.dct_distance.eps_05": 53, "asa.tg.dct_distance.eps_07": 34, "asa.tg.dct_distance.eps_09": 11,
    "asa.tg.gain_range": (0.2, 0.1), "asa.tg.svd.out_follows_in": 0, "asa.tg.evaluation.same": 0,
    "anti.cor2.never_smooths": 28.9, "anti.attnscale.parameters": 100,
    "anti.result.deit_s_12.attnscale": 0.9, "anti.result.deit_s_12.featscale": 1.0,
    "anti.result.deit_s_24.attnscale": 0.6, "anti.result.deit_s_24.featscale": 0.8,
    "anti.result.cait_s24": 0.6, "anti.result.swin_s": 0.5, "anti.result.fine_tuning": 0.2,
    "cut.prop1.logit_range": -1, "cut.prop2.dominant": 0, "cut.dino.ten_layers": 0, "cut.init.insensitive": 0,
    "cut.init.diagonal_weight": 0.012, "cut.init.kappa_attention": 4.1,
    "cut.supervised.adamw.skips": 80.3, "cut.supervised.soap.skips": 80.1,
    "cut.supervised.adamw.default": 61.4, "cut.supervised.soap.default": 77.0,
    "cut.supervised.adamw.init": 78.1, "cut.supervised.soap.init": 80.8,
    "cut.dino.voc.single.skips": (56.3, 63.3), "cut.dino.voc.single.skipless": (62.3, 62.9),
    "cut.dino.voc.multi.skips": (61.6, 63.3), "cut.dino.voc.multi.skipless": (65.4, 62.9),
    "cut.dino.coco_stuff.single.skips": (24.6, 26.2), "cut.dino.coco_stuff.single.skipless": (24.9, 25.7),
    "cut.dino.ade20k.single.skips": (23.7, 28.6), "cut.dino.ade20k.single.skipless": (22.5, 27.6),
    "cut.dino.ade20k.multi.skips": (26.0, 28.6), "cut.dino.ade20k.multi.skipless": (26.3, 27.6),
    "cut.dino.tokencut.voc.skips": (49.4, 54.3), "cut.dino.tokencut.voc.skipless": (63.2, 51.5),
    "cut.dino.tokencut.coco20k.skips": 27.5, "cut.dino.tokencut.coco20k.skipless": 46.7,
    "cut.repro.soap.skips": 24.8, "cut.repro.soap.default": 14.6, "cut.repro.soap.init": 28.8,
    "cut.repro.adamw.skips": 7.2, "cut.repro.adamw.default": 1.0, "cut.repro.adamw.init": 1.6,
    "cut.repro.adamw_gentle.gap": 12.8,
    "cut.repro.dino.voc.skips": 20.2, "cut.repro.dino.voc.skipless": 7.4,
    "cut.repro.dino.tokencut.skips": 50.5, "cut.repro.dino.tokencut.skipless": 23.7,
}  # fmt: skip
ARMS = {
    "plain": (81.0, 6.72, 6.74), "eps_09": (81.2, 6.64, 6.66), "eps_07": (81.4, 6.15, 6.17),
    "eps_06": (81.4, 5.73, 5.71), "eps_05": (81.0, 5.29, 5.25),
}  # fmt: skip
MODELS = {
    "vit_s": (80.2, 95.1, 80.4, 95.2), "vit_b": (81.0, 95.3, 81.3, 95.4), "swin_s": (81.3, 95.6, 81.6, 95.6),
    "cait_s": (82.6, 96.1, 82.7, 96.3), "pvt_v2_b3": (82.9, 96.0, 83.0, 96.1), "mae_vit_b": (83.0, 96.4, 83.2, 96.6),
}  # fmt: skip
for arm, cells in ARMS.items():
    NUMBERS |= dict(zip((f"asa.tg.svd.{arm}.{cell}" for cell in ("top1", "kappa_in", "kappa_out")), cells, strict=True))
for model, cells in MODELS.items():
    names = (f"asa.tg.dct.{model}.{cell}" for cell in ("plain.top1", "plain.top5", "dct.top1", "dct.top5"))
    NUMBERS |= dict(zip(names, cells, strict=True))

# Claims on the difference of two cells, and the cells.
DIFFERENCES = {
    "asa.skip.drop_no_ffn": ("asa.skip.no_ffn", "asa.skip.both"),
    "asa.skip.drop_no_sab": ("asa.skip.no_sab", "asa.skip.both"),
    "asa.skip.asymmetry": ("asa.skip.no_sab", "asa.skip.no_ffn"),
    "asa.kappa.sab_above_sum": ("asa.kappa.sab", "asa.kappa.sab_plus_input"),
    "asa.kappa.sab_above_ffn": ("asa.kappa.sab", "asa.kappa.ffn"),
    "asa.tg.svd.gain": ("asa.tg.svd.eps_07.top1", "asa.tg.svd.plain.top1"),
    "asa.tg.svd.too_much": ("asa.tg.svd.eps_05.top1", "asa.tg.svd.eps_07.top1"),
    "asa.tg.svd.kappa_in_falls": ("asa.tg.svd.eps_05.kappa_in", "asa.tg.svd.plain.kappa_in"),
    "asa.tg.svd.kappa_out_falls": ("asa.tg.svd.eps_05.kappa_out", "asa.tg.svd.plain.kappa_out"),
    **{f"asa.tg.dct.{one}.gain": (f"asa.tg.dct.{one}.dct.top1", f"asa.tg.dct.{one}.plain.top1") for one in MODELS},
    "cut.supervised.adamw.rescue": ("cut.supervised.adamw.init", "cut.supervised.adamw.default"),
    "cut.supervised.soap.rescue": ("cut.supervised.soap.init", "cut.supervised.soap.default"),
    "cut.supervised.beats_skips": ("cut.supervised.soap.init", "cut.supervised.soap.skips"),
    "cut.supervised.soap_helps": ("cut.supervised.soap.default", "cut.supervised.adamw.default"),
    "cut.dino.segmentation_better": ("cut.dino.voc.single.skipless", "cut.dino.voc.single.skips"),
    "cut.dino.discovery_better": ("cut.dino.tokencut.voc.skipless", "cut.dino.tokencut.voc.skips"),
}  # fmt: skip
# Pairs of cells that their table tells apart, without a claim on the difference.
APART = [
    ("cut.repro.soap.init", "cut.repro.soap.skips"), ("cut.repro.soap.skips", "cut.repro.soap.default"),
    ("cut.repro.adamw.init", "cut.repro.adamw.default"), ("cut.repro.adamw.skips", "cut.repro.adamw.init"),
    ("cut.repro.dino.voc.skips", "cut.repro.dino.voc.skipless"),
    ("cut.repro.dino.tokencut.skips", "cut.repro.dino.tokencut.skipless"),
    ("asa.tg.dct_distance.eps_05", "asa.tg.dct_distance.eps_07"),
    ("asa.tg.dct_distance.eps_07", "asa.tg.dct_distance.eps_09"),
    *(tuple(f"cut.dino.{task}.{arm}" for arm in ("skips", "skipless")) for task in (
        "voc.multi", "coco_stuff.single", "ade20k.single", "ade20k.multi", "tokencut.coco20k")),
    *(tuple(f"asa.tg.svd.{arm}.{cell}" for arm in pair) for pair in itertools.pairwise(ARMS) for cell in (
        "kappa_in", "kappa_out")),
]  # fmt: skip


def first(name):
    """Return a number as the paper itself gives it."""
    number = NUMBERS[name]
    return number[0] if isinstance(number, tuple) else number


DIFFERENT = {name: round(first(cell) - first(other), 2) for name, (cell, other) in DIFFERENCES.items()}

# What the papers state of all cases; a statement that is ours does not count against them.
STATEMENTS = (
    "asa.prop41.as_stated asa.ffn.product asa.tg.svd_exact anti.thm1.as_stated anti.cor2.stochastic "
    "anti.thm3.as_stated anti.thm3.monotone anti.thm3.logits_dot anti.thm3.logits_l2 anti.thm3.logits_logistic "
    "anti.ext.multihead anti.ext.skip anti.ext.skip_identity anti.ext.ffn anti.ext.ffn_skip anti.fig1.bound.sa "
    "anti.fig1.bound.sa_ffn anti.fig1.bound.sa_skip anti.fig1.bound.all anti.attnscale.neutral anti.featscale.neutral "
    "cut.jacobian.formula cut.jacobian.skip cut.jacobian.product cut.prop1.uniform cut.prop1.diagonal "
    "cut.prop2.repaired cut.init.orthogonal cut.init.architecture"
).split()


def test_every_number_is_typed_twice():
    assert {name: one.value for name, one in claims.claims().items() if one.value is not None} == NUMBERS | DIFFERENT


def test_the_papers_state_what_they_state_and_no_more():
    stated = [name for name, one in claims.claims().items() if one.rule.kind == "statement" and one.whose == "paper"]
    assert stated == STATEMENTS


def test_what_comes_from_us_does_not_count_as_a_papers():
    for name, one in claims.claims().items():
        if re.search(r"\b(ours|reading|reproduction)\b", one.where.lower()):
            assert one.whose != "paper", name
        assert (one.whose == "third party") == name.startswith("cut.repro."), name


def test_a_tolerance_lies_below_half_of_the_effect_that_its_table_is_about():
    known = claims.claims()
    for pair in [*DIFFERENCES.values(), *APART]:
        for name in pair:
            assert known[name].tolerance < abs(first(pair[0]) - first(pair[1])) / 2, pair
    for name, one in known.items():
        if one.rule.verdict == claims.DISAGREE:
            assert one.tolerance < abs(one.value[0] - one.value[1]) / 2, name


def test_the_claims_cover_every_notebook_paper_choice_and_need():
    known, content = claims.claims().values(), yaml.safe_load(claims.CLAIMS.read_text(encoding="utf-8"))
    assert {one.notebook for one in known} == set(fingerprint.notebooks()) - {fingerprint.OVERVIEW, "07_playground"}
    assert {one.paper for one in known} == set(claims.papers()) == set(content["papers"])
    assert {one.rule.choose for one in known} - {""} == set(content["choose"])
    assert {need for one in known for need in one.needs} == set(claims.needs()) == set(content["needs"])


def test_trained_networks_are_compared_with_what_they_were():
    """What a picture of a trained network shows is no finding where the untrained one shows it too."""
    for name, one in claims.claims().items():
        if one.notebook == "03_low_pass" and one.rule.kind == "effect" and one.whose == "paper":
            assert {"learnt", "beyond_untrained"} <= set(one.needs) or name == "anti.fig1.ffn_delays"


def measurements(claim, count):
    """Return measurements of as many equal values, or cases, as a rule asks for, of all sizes."""
    needs = dict.fromkeys(claim.needs, Need(True, ""))
    if claim.rule.cases:
        hits = {0, claim.rule.cases}
        return [Measurement(violations=hit, cases=claim.rule.cases, note="x", needs=needs) for hit in hits]
    sizes = {0.0, claim.value or 0.0, -1e6, 1e6}
    for test in filter(None, (claim.rule.test, claim.rule.lower)):
        sizes |= {test.threshold + 1.1 * test.least, test.threshold - 1.1 * test.least, 1.01 * test.threshold}
    return [Measurement((size,) * count, needs=needs) for size in sizes]


def test_every_rule_decides_its_claim_either_way_with_as_many_values_as_it_asks_for():
    for claim, preset in itertools.product(claims.claims().values(), judging.RANK):
        rule, at_tier = claim.rule, judging.RANK[preset] >= judging.RANK[claim.tier]
        if rule.kind == "fixed":
            continue
        count = rule.lower.seeds if rule.lower and not at_tier and rule.kind != "timing" else rule.seeds
        found = [judging.judge(claim, one, preset) for one in measurements(claim, count or rule.repetitions or 1)]
        if rule.kind == "timing":
            assert {one.verdict.split()[-4] for one in found} == {"0", "1"}, claim.id  # holds on N of 1 processor
        elif at_tier:
            assert {one.verdict for one in found} >= {
                judging.REPRODUCED, judging.FALSE if rule.kind == "statement" else judging.NOT_REPRODUCED
            }, claim.id  # fmt: skip
        elif rule.lower or rule.kind not in ("number", "equivalence"):
            assert {one.verdict for one in found} >= {judging.DIRECTION_ONLY, judging.OPPOSITE}, (claim.id, preset)
        else:
            assert {one.verdict for one in found} == {judging.NOT_RUN}, claim.id


@pytest.mark.parametrize("preset", ["gpu", "paper"])
def test_a_preset_brings_as_many_seeds_as_the_claims_of_its_tier_ask_for(preset):
    for claim in claims.claims().values():
        if claim.tier == preset and (claim.rule.choose in ("baseline", "recipe") or claim.unit == "% of seeds"):
            declared = params.stored_declarations(claim.notebook)
            given = params.preset_values(claim.notebook, preset, declared)
            seeds = given.get("seeds", declared["seeds"].default)
            assert len(seeds) >= max(claim.rule.seeds, claim.rule.cases), claim.id


def test_what_is_a_time_has_a_rule_of_times():
    rules = {name: claim.rule.kind for name, claim in claims.claims().items() if name.startswith("asa.time.")}
    assert set(rules.values()) == {"timing", "fixed"} and list(rules.values()).count("timing") == 7
    for name, claim in claims.claims().items():
        if re.search(r"\b(seconds?|faster|processor time|training step|timed)\b", claim.rule.statistic):
            assert claim.rule.kind == "timing", name


def test_the_claims_name_no_place_outside_the_project():
    text = claims.CLAIMS.read_text(encoding="utf-8")
    assert not re.search(r"PAPERS|DESIGN|\.md\b", text)
    assert max(map(len, text.splitlines())) <= 120


# --- Malformed files --------------------------------------------------------------------------------------------------

SMALL = """\
papers: {asa: A paper}
choose: {nothing: Nothing is chosen.}
needs: {learnt: It has learnt.}
claims:
  asa.a.number:
    needs: [learnt]
    where: Table 1
    statement: It is so.
    value: 1
    unit: points
    tolerance: 0.5
    why: Rounded.
    notebook: 01_skip_removal
    tier: gpu
    rule:
      kind: number
      statistic: The mean.
      seeds: 3
      choose: nothing
      lower: {above: 0, seeds: 3}
  asa.a.theorem:
    where: Theorem 1
    statement: It is always so.
    notebook: 04_bounds
    tier: quick
    rule: {kind: statement, statistic: Counted., cases: 10}
  asa.a.effect:
    where: Figure 1
    statement: It falls.
    unit: points
    whose: ours
    notebook: 04_bounds
    tier: quick
    rule: {kind: effect, statistic: S., seeds: 4, choose: nothing, test: {below: 9, least: 2, most: 8}}
  asa.a.time:
    where: Table 2
    statement: It is fast.
    value: 3
    unit: ×
    notebook: 04_bounds
    tier: quick
    rule: {kind: timing, statistic: S., repetitions: 3, test: {above: 2}, lower: {above: 1}}
"""
EFFECT, THEOREM = (
    "{kind: effect, statistic: S., seeds: 4, choose: nothing, test: {below: 9, least: 2, most: 8}}",
    ("{kind: statement, statistic: Counted., cases: 10}"),
)


def read(tmp_path, text):
    path = tmp_path / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    return claims.claims(path)


def test_a_small_file_is_read_as_it_says(tmp_path):
    number, theorem, effect, time = read(tmp_path, SMALL).values()
    assert number.rule.lower == claims.Test("above", 0.0, least=0.5, seeds=3) and number.needs == ("learnt",)
    assert (number.whose, effect.whose) == ("paper", "ours") and theorem.rule.cases == 10
    assert effect.rule.test == claims.Test("below", 9.0, least=2.0, most=8.0) and effect.rule.seeds == 4
    assert (time.rule.test, time.rule.lower) == (claims.Test("above", 2.0), claims.Test("above", 1.0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tolerance: 0.5", "tolerence: 0.5", "asa.a.number: unknown field of claim 'tolerence'; did you mean"),
        ("    tolerance: 0.5\n    why: Rounded.\n", "", "asa.a.number: claim with a number rule lacks 'tolerance'"),
        ("    why: Rounded.\n", "", "asa.a.number: claim with a number rule lacks 'why'"),
        ("tolerance: 0.5", "tolerance: 5e-1", "must be a finite number >= 0, not '5e-1' (YAML reads 3e-4 as text"),
        ("tolerance: 0.5", "tolerance: -1", "tolerance must be a finite number >= 0, not -1"),
        ("tolerance: 0.5", "tolerance: no", "tolerance must be a finite number >= 0, not False"),
        ("value: 1", "value: .nan", "asa.a.number: value must be a finite number, not nan"),
        ("value: 1", "value: about 1", "asa.a.number: value must be a finite number, not 'about 1'"),
        ("value: 1", "value: [1, 2]", "needs least, the smallest effect of interest"),
        ("value: 1", "value: -1", "asa.a.number: value -1 is not what its lower asks for"),
        ("lower: {above: 0, seeds: 3}", "lower: {above: 0, seeds: 3, least: 2}", "value 1 is not what its lower asks"),
        ("lower: {above: 0, seeds: 3}", "lower: {above: 0, seeds: 3, most: 0.9}", "value 1 is not what its lower asks"),
        ("    value: 3\n", "    value: 1.5\n", "asa.a.time: value 1.5 is not what its test asks for"),
        ("    value: 3\n", "", "asa.a.time: test within needs a value to be near"),
        ("tier: gpu", "tier: gpus", "unknown tier 'gpus'; did you mean 'gpu'? (allowed: gpu, paper, quick)"),
        ("01_skip_removal", "01_skip_remova", "unknown notebook '01_skip_remova'; did you mean '01_skip_removal'?"),
        ("whose: ours", "whose: our", "unknown whose 'our'; did you mean 'ours'?"),
        ("[learnt]", "[learned]", "asa.a.number: unknown need 'learned'; did you mean 'learnt'?"),
        ("[learnt]", "{learnt: yes}", "asa.a.number: needs must be text, not {'learnt': True}"),
        ("kind: number", "kind: numbr", "unknown kind 'numbr'; did you mean 'number'?"),
        ("      seeds: 3\n", "", "asa.a.number: number rule lacks 'seeds'"),
        ("      seeds: 3\n", "      seeds: 1\n", "seeds must be a whole number >= 2, not 1: one value has no interval"),
        ("      seeds: 3\n", "      seeds: true\n", "seeds must be a whole number >= 2, not True"),
        ("choose: nothing\n", "choose: nothin\n", "unknown choose 'nothin'; did you mean 'nothing'?"),
        ("{above: 0, seeds", "{abov: 0, seeds", "unknown field of lower 'abov'; did you mean 'above'?"),
        ("{above: 0, seeds", "{above: 0, below: 1, seeds", "lower needs exactly one of below, above, within"),
        ("{above: 0, seeds: 3}", "{above: 0}", "asa.a.number: lower lacks 'seeds'"),
        ("{above: 0, seeds: 3}", "{above: 0, seeds: 1}", "seeds must be a whole number >= 2, not 1"),
        ("{above: 0, seeds: 3}", "{within: -1, seeds: 3}", "within must be a finite number >= 0, not -1"),
        ("{above: 0, seeds: 3}", "{within: 1, seeds: 3, most: 2}", "least and most go with above and below"),
        ("{below: 9, least: 2, most: 8}", "{below: 9}", "asa.a.effect: test needs least, the smallest effect of"),
        ("{below: 9, least: 2, most: 8}", "{below: 9, least: -2}", "least must be a finite number >= 0, not -2"),
        ("{below: 9, least: 2, most: 8}", "{within: 9}", "asa.a.effect: unknown field of test 'within'"),
        ("{below: 9, least: 2, most: 8}", "{below: 9, least: 2, seeds: 3}", "unknown field of test 'seeds'"),
        ("{below: 9, least: 2, most: 8}", "{below: 9, by_sd: 1}", "unknown field of test 'by_sd'"),
        (EFFECT, "{kind: direction, seeds: 3}", "unknown kind 'direction'"),
        (EFFECT, "{kind: exact, statistic: S.}", "an exact rule needs a test, or the claim a value and a tolerance"),
        (EFFECT, "{kind: share, statistic: S., cases: 9, test: {above: 0}}", "asa.a.effect: test needs least"),
        ("cases: 10", "cases: 10, test: {above: 0}", "unknown field of statement rule 'test'"),
        ("cases: 10", "cases: ten", "cases must be a whole number >= 1, not 'ten'"),
        ("repetitions: 3, ", "", "asa.a.time: timing rule lacks 'repetitions'"),
        ("{above: 2}", "{above: 2, least: 1}", "unknown field of test 'least' (allowed: above, below, within"),
        ("{above: 1}", "{above: 1, seeds: 3}", "asa.a.time: unknown field of lower 'seeds'"),
        ("    unit: ×\n", "", "asa.a.time: claim with a timing rule lacks 'unit'"),
        (THEOREM, "prove it", "rule must be a block with 'kind'"),
        (THEOREM, "{kind: fixed, verdict: reproduced, evidence: me}",
         "unknown verdict 'reproduced' (allowed: cannot be checked from our sources, sources disagree, vague)"),
        (THEOREM, "{kind: fixed, verdict: sources disagree, evidence: me}", "goes with a list of values"),
        ("asa.a.theorem", "asa.a.number", "'asa.a.number' is given twice (line 21)"),
        ("value: 1\n", "value: 1\n    value: 2\n", "'value' is given twice (line 10)"),
        ("asa.a.theorem", "anti.a.theorem", "anti.a.theorem: unknown paper 'anti'"),
        ("asa.a.theorem", "Asa theorem", "Asa theorem: an id is lower-case words joined by dots"),
        ("where: Theorem 1", "where: ''", "where must be text, not ''"),
        ("where: Theorem 1", "where: 2022-01-01", "where must be text"),
        ("papers: {asa: A paper}\n", "", "file lacks 'papers'"),
        ("needs: {learnt: It has learnt.}\n", "", "file lacks 'needs'"),
        ("choose: {nothing: Nothing is chosen.}", "choose: [nothing]", "choose must be a block of named entries"),
        ("papers:", "paper:", "unknown field of file 'paper'; did you mean 'papers'?"),
        ("claims:", "claims: {", "not valid YAML"),
        ("value: 1", "value: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (SMALL, "", "file must be a block of fields, not None"),
        (SMALL, "- a", "file must be a block of fields, not ['a']"),
    ],
)  # fmt: skip
def test_a_malformed_file_gets_one_line_that_names_the_entry(tmp_path, old, new, message):
    assert old in SMALL
    text = SMALL.replace(old, new, 1)
    if "within needs a value" in message:
        text = text.replace("{above: 2}", "{within: 2}")
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith("claims.yaml: ") and "\n" not in str(caught.value)


def test_one_value_is_no_list_and_no_disagreement(tmp_path):
    for value in ("[1]", "[]"):
        text = SMALL.replace("value: 1", f"value: {value}").replace("      lower: {above: 0, seeds: 3}\n", "")
        with pytest.raises(InputError, match="'sources disagree' goes with a list of values and a tolerance"):
            read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot read .*nowhere.yaml"):
        claims.claims(tmp_path / "nowhere.yaml")


@given(st.integers(0, len(SMALL)), st.integers(0, 40), st.text(max_size=12) | st.sampled_from(
    ["!!float x", "!!bool x", "!!timestamp x", "!!set {a}", "&a [*a]", "{<<: 3}", "? [a]", "2010-99-99", "\t", "- "]
))  # fmt: skip
def test_no_edit_of_the_file_escapes_the_one_line_error(start, length, text):
    edited = SMALL[:start] + text + SMALL[start + length :]
    try:
        found = claims._parse(edited)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(claim, claims.Claim) for claim in found.claims.values())
