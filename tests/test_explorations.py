"""The explorers' numbers, over their whole grids: finite, drawn, and as the theory says."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy
import pytest
import torch

from skiplab.companion import explorations, figures
from skiplab.companion.explorations import Panel, Slider
from skiplab.companion.fingerprint import notebook_code_cells
from skiplab.errors import InputError
from skiplab.studies.bounds import explorer
from skiplab.studies.playground import replay
from skiplab.studies.playground.explorers import EXPLORATIONS
from skiplab.studies.skip_removal import explorer as skip_removal_explorer
from skiplab.studies.skipless import explorer as skipless_explorer
from skiplab.studies.token_graying import explorer as token_graying_explorer
from skiplab.theory.spectral import hc
from skiplab.transforms.graying import patchify

UNDEFINED = {"all_pass": lambda state: state["s"] == -1, "skipless": lambda state: 16 % state["heads"]}


def states(exploration):
    """Every value of each control, and the ends and middles of all controls together."""
    controls = exploration.controls
    single = [exploration.values({name: value}) for name, control in controls.items() for value in control.grid(1000)]
    return single + [
        dict(zip(controls, values)) for values in itertools.product(*(each.grid(3) for each in controls.values()))
    ]


@pytest.mark.parametrize("exploration", EXPLORATIONS.values(), ids=EXPLORATIONS)
def test_every_state_of_the_grid_has_numbers_or_says_in_words_why_not(exploration):
    undefined = UNDEFINED.get(exploration.name, lambda state: False)
    for state in states(exploration):
        if undefined(state):
            with pytest.raises(InputError, match="nearest|not defined"):
                exploration.find(**state)
            continue
        found = exploration.find(**state)
        text = " ".join(exploration.facts(found))
        assert text and not re.search(r"\b(nan|inf)\b", text), state
        CHECKS[exploration.name](found, state)


def check_low_pass(found, state):
    assert found.before.shape == found.after.shape == (96, 96, 3)
    assert found.gains.isfinite().all() and 0 <= found.rate <= 1 + 1e-12
    assert found.ratios.isfinite().all() and found.ratios[12] <= found.ratios[0] * (1 + 1e-12)
    if state["layers"] == 0:
        assert (found.before == found.after).all() and found.gains.numpy() == pytest.approx(1)


def check_skip_strength(found, state):
    for kappa, values in zip(found.kappas, (found.skipped, found.jacobian_skipped)):
        ratio = float(values[0] / values[-1])
        assert ratio > 1e12 if math.isinf(kappa) else kappa == pytest.approx(ratio, rel=1e-6)
    assert math.isfinite(sum(found.kappas)) or state["sharpness"] == state["s"] == 0
    position = round(state["s"] * 20)
    assert found.token_kappas[position] == pytest.approx(found.kappas[0], rel=1e-5)
    if state["s"] == 0:
        assert (found.bare == found.skipped).all() and (found.jacobian == found.jacobian_skipped).all()


def check_graying(found, state):
    original, by_svd, by_dct = found.kappas
    assert 1 <= original < 1e6 and by_dct >= 1
    assert by_svd == pytest.approx(original ** state["epsilon"], rel=1e-5) == pytest.approx(found.expected, rel=1e-5)


def check_bound(found, state):
    assert (found.measured <= found.sharp * (1 + 1e-9) + 1e-12).all() and (
        found.sharp <= found.bounds * (1 + 1e-9)
    ).all()
    assert found.measured_here <= found.bound * (1 + 1e-9)
    assert found.guaranteed == (found.bound < 1)
    assert (found.decay[1:] <= found.bound * found.decay[:-1] * (1 + 1e-9) + 1e-12).all()
    assert found.guaranteed or state["norm"] >= state["tokens"] ** -0.5
    said = " ".join(explorer.bound_facts(found))
    assert ("says nothing here" in said) != found.guaranteed != ("guaranteed" not in said)


def check_all_pass(found, state):
    for kind, factor in (("AttnScale", 1 + state["omega"]), ("FeatScale", 1 + state["t"])):
        expected = found.spectra["plain"][1:] * factor ** state["layers"]
        assert found.spectra[kind][1:].numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-9)
    assert found.maps["Â"][1:].numpy() == pytest.approx((found.maps["A"][1:] * (1 + state["omega"])).numpy(), rel=1e-9)
    assert all(ratios.isfinite().all() for ratios in found.ratios.values())


def check_skipless(found, state):
    for name in ("skipless", "usual"):
        assert found.maps[name].sum(dim=1).numpy() == pytest.approx(1)
        assert found.kappas[name] >= 1 and 0 <= found.diagonal[name] <= 1
    again = skipless_explorer.skipless(**state | {"c": 1.0})
    assert found.spectra["skipless"].numpy() == pytest.approx(
        state["c"] ** 2 * again.spectra["skipless"].numpy(), rel=1e-6, abs=1e-12
    )


CHECKS = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}


def test_blurring_ends_in_grey():
    """After many layers of nearly uniform attention every patch is the mean patch."""
    found = EXPLORATIONS["low_pass"].find(temperature=5.0, logits="random", layers=12)
    patches = patchify(torch.from_numpy(found.after).movedim(-1, 0), 12)
    assert float(hc(patches).abs().max()) < 1e-6 and found.ratios[12] < 1e-6 < found.ratios[0]


def test_the_ratio_falls_like_the_second_eigenvalue():
    found = EXPLORATIONS["low_pass"].find(logits="distance", tokens=144)
    rates = found.ratios[1:] / found.ratios[:-1]
    assert float(rates[-1]) == pytest.approx(found.rate, rel=0.05)


def test_a_full_skip_conditions_both_tokens_and_jacobian():
    found = EXPLORATIONS["skip_strength"].find(s=1.0)
    assert found.kappas[0] < found.token_kappas[0] / 10 and found.kappas[1] < found.jacobian_kappas[0] / 10


def test_decay_is_guaranteed_below_one_over_root_n_for_any_logits():
    for alpha in (0.0, 4.0):
        found = EXPLORATIONS["bound"].find(alpha=alpha, tokens=64, norm=0.1, pattern="two camps")
        assert found.guaranteed and (found.decay.diff() <= 1e-12).all()


def test_all_pass_without_scaling_changes_nothing():
    found = EXPLORATIONS["all_pass"].find(omega=0.0, s=0.0, t=0.0)
    for kind in ("AttnScale", "FeatScale"):
        assert found.ratios[kind].numpy() == pytest.approx(found.ratios["plain"].numpy(), rel=1e-9)


def test_a_large_beta_makes_attention_nearly_the_identity():
    found = EXPLORATIONS["skipless"].find(beta=4.0, alpha=0.1, heads=1)
    assert (
        found.diagonal["skipless"] > 0.9 > found.diagonal["usual"]
        and found.kappas["skipless"] < found.kappas["usual"] / 100
    )


def test_a_picture_of_one_colour_has_infinite_kappa_in_words():
    pixels = torch.full((3, 128, 128), 77, dtype=torch.uint8)
    found = token_graying_explorer.graying("astronaut", 0.5, 16, pixels)
    assert math.isinf(found.kappas[0]) and "infinite" in token_graying_explorer.graying_facts(found)[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temprature": 1.0}, "unknown control of low_pass 'temprature'; did you mean 'temperature'"),
        ({"temperature": 0}, "temperature is 0; allowed: a number from 0.2 to 5.0"),
        ({"layers": 2.5}, "layers is 2.5; it must be a whole number"),
        ({"layers": True}, "layers is True"),
        ({"logits": "contents"}, "did you mean 'content'"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        EXPLORATIONS["low_pass"].values(changes)


def test_a_slider_has_both_ends_in_its_grid():
    assert Slider("x", 0.2, 5.0, 0.2, 1.0).grid(3) == [0.2, 2.6, 5.0]
    assert Slider("n", 1, 8, 1, 1).grid(100) == list(range(1, 9)) and Slider("n", 3, 3, 1, 3).grid(3) == [3]


@pytest.mark.parametrize("exploration", EXPLORATIONS.values(), ids=EXPLORATIONS)
def test_a_strip_shows_three_to_five_different_states(exploration):
    figures.theme()
    figure = explorations.strip(exploration)
    rows = figure.subfigs
    assert 3 <= len(rows) <= 5 and len({row.get_suptitle() for row in rows}) == len(rows)
    assert all(len(row.axes) == len(exploration.panels) for row in rows)
    figure.canvas.draw()
    figures.plt.close(figure)


@pytest.mark.parametrize(
    "name, start",
    [
        ("graying", {"epsilon": 1.0}),
        ("skipless", {"beta": 4.0, "similarity": 0.9}),
        ("all_pass", {"omega": 0.0, "t": 0.0, "s": 1.0}),
        ("bound", {"norm": 0.2, "pattern": "two camps"}),
    ],
)
def test_a_strip_repeats_no_state_where_it_starts_at_one(name, start):
    figure = explorations.strip(EXPLORATIONS[name], start)
    titles = [row.get_suptitle() for row in figure.subfigs]
    assert len(titles) == len(set(titles)) == 4
    figures.plt.close(figure)


def test_a_band_is_drawn_with_its_words():
    figure, axis = figures.plt.subplots()
    Panel("", ("x", 0, 1), (0, 10), log="", band=(9, 10, "beyond")).prepare(axis)
    assert (
        [text.get_text() for text in axis.texts] == ["beyond"] and len(axis.patches) == 1 and axis.get_ylim() == (0, 10)
    )
    figures.plt.close(figure)


def test_infinite_kappa_is_called_so_by_all():
    assert (
        "κ(SA(X)) = infinite"
        in skip_removal_explorer.skip_strength_facts(EXPLORATIONS["skip_strength"].find(sharpness=0.0))[0]
    )
    found = EXPLORATIONS["skipless"].find()
    found.kappas["usual"] = math.inf
    assert "usual infinite" in skipless_explorer.skipless_facts(found)[0]


# --- The exercises of notebook 07 -------------------------------------------------------------------------------------

CELLS = [source for source, _ in notebook_code_cells("07_playground")]
ANSWERS = [cell for cell in CELLS if cell.startswith("answer = None")]


def trained(arm, scores):
    """What the replay reads of a run of one block with these validation scores."""
    return SimpleNamespace(
        config=SimpleNamespace(skip=arm, epochs=len(scores) - 1),
        history=[
            {
                "epoch": epoch,
                "validation_top1": score,
                "attention": [[[0.5, 0.5], [0.5, 0.5]]],
                "log_kappa": [{"place": "sab", "block": 0, "median_log_kappa": 1.0, "n_inf": 0, "n_nan": 0, "n": 4}],
            }
            for epoch, score in enumerate(scores)
        ],
    )


def answered(exercise, answer, capsys):
    """Run an answer cell with `answer`, as the notebook does after its first cell; return what it prints."""
    names = {"p": SimpleNamespace(epochs=3)}
    exec(CELLS[0], names)
    names["training_explorer"] = replay.exploration(
        [trained("both", [10.0, 81.0, 84.0, 83.0]), trained("no_sab", [10.0, 70.0, 75.0, 85.0])]
    )
    exec(ANSWERS[exercise].replace("answer = None", f"answer = {answer}", 1), names)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "exercise, low, high",
    [(0, 2, 8), (1, 0.05, 0.5), (2, 0.43, 0.43), (3, 0.2, 0.2), (4, 4.0, 5.0), (5, 4, 4), (6, 2, 2)],
)
def test_the_exercises_tell_right_from_wrong(exercise, low, high, capsys, monkeypatch):
    """Where the right answer depends on what was drawn, it lies between `low` and `high`."""
    assert len(ANSWERS) == 7
    found, judge = [], explorations.judge
    monkeypatch.setattr(explorations, "judge", lambda answer, right: found.append(right) or judge(answer, right))
    answered(exercise, None, capsys)
    right = found[0]
    assert low - 1e-9 <= right <= high + 1e-9
    assert answered(exercise, right, capsys) == "right"
    assert answered(exercise, 0.8 * right, capsys) == f"not yet: {0.8 * right:g} is too small"
    assert answered(exercise, 1.2 * right, capsys) == f"not yet: {1.2 * right:g} is too large"
    assert answered(exercise, None, capsys).startswith("no answer yet")


@pytest.mark.parametrize(
    "answer, said",
    [
        (None, "no answer yet"),
        (7, "right"),
        (7.004, "right"),
        (6, "not yet: 6 is too small"),
        (7.1, "not yet: 7.1 is too large"),
        ("seven", "'seven' is not a number"),
        (True, "True is not a number"),
    ],
)
def test_an_answer_is_judged_without_giving_it_away(answer, said):
    assert explorations.judge(answer, 7.0).startswith(said) and (
        answer in (7, 7.004) or "7.0" not in explorations.judge(answer, 7.0)
    )


def test_no_control_starts_outside_its_range():
    for exploration in EXPLORATIONS.values():
        assert list(exploration.values({})) == list(exploration.controls)
        assert numpy.isfinite([value for value in exploration.values({}).values() if not isinstance(value, str)]).all()
