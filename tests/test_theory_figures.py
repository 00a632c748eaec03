"""The figures of notebooks 03 and 04 show every row they are given, with labelled axes and legends."""

import math

import pandas
import pytest
import torch
from matplotlib import pyplot

from skiplab.studies.bounds import plots as bounds_plots
from skiplab.studies.bounds import statements, tables
from skiplab.studies.low_pass import layers, plots
from skiplab.theory import conditioning


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def test_filters_draw_a_line_per_kind_and_power():
    gains = torch.rand(4, 9, dtype=torch.float64) + 0.1
    figure = plots.filters({"a": gains, "b": gains}, {1: gains[0], 2: gains[1]}, {1: gains[0]})
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1]
    assert all(axis.get_xlabel() and axis.get_legend() for axis in figure.axes)


def test_intensities_have_a_panel_per_variant_and_leave_nothing_out():
    table = pandas.DataFrame(
        [
            {"variant": variant, "layer": layer, "intensity": -layer, "one_step": 5.0, "accumulated": 9.0 * layer}
            for variant in layers.VARIANTS
            for layer in range(4)
        ]
    )
    figure = plots.intensities(table)
    assert [axis.get_title() for axis in figure.axes] == list(layers.VARIANTS)
    assert figure.axes[0].get_ylim()[1] > 27 and len(figure.legends[0].texts) == 3


def test_spectra_have_a_panel_per_layer_and_head():
    gains = torch.rand(3, 2, 8) + 0.1
    figure = plots.spectra(gains, gains)
    assert len(figure.axes) == 6 and all(len(axis.lines) == 2 for axis in figure.axes)


def test_trained_models_of_others_have_a_panel_per_layer_and_a_line_per_head():
    figure = plots.head_spectra(
        {"a": (torch.linspace(0, 0.5, 9), torch.ones(7, 3, 9)), "b": (torch.linspace(0, 0.5, 5), torch.ones(2, 4, 5))}
    )
    drawn = [axis for axis in figure.axes if axis.lines]
    assert [len(axis.lines) for axis in drawn] == [3] * 7 + [4] * 2
    assert [axis.get_title() for axis in drawn] == [f"layer {layer}" for layer in (*range(1, 8), 1, 2)]
    assert [part.get_suptitle().split(",")[0] for part in figure.subfigs] == ["a", "b"]


def test_photograph_spectra_show_first_and_last_layer():
    spectra = {
        "frequencies": torch.linspace(0, 0.5, 9),
        "patches": torch.ones(1, 9),
        "sab": torch.ones(12, 9),
        "tokens": torch.arange(13.0)[:, None].expand(13, 9),
    }
    figure = plots.photograph_spectra({"a": spectra, "b": spectra})
    names = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes]
    assert names[:2] == names[2:] and names[0] == ["pixels", "layer 1", "layer 5", "layer 8", "layer 12"]
    assert names[1][1] == "before layer 1" and figure.axes[1].lines[-1].get_ydata()[0] == 12


@pytest.mark.parametrize("blocks", [2, 24])
def test_parts_show_their_numbers_where_there_is_room(blocks):
    table = pandas.DataFrame(-0.01, index=["a", "b"], columns=range(1, blocks + 1))
    texts = [text.get_text() for text in plots.parts(table).axes[0].texts]
    assert texts == (["0.0"] * 4 if blocks == 2 else [])


def test_similarities_and_logits():
    table = pandas.DataFrame(
        [
            {"layers": name, "depth": depth, "features": 0.5, "attention": 0.6}
            for name in ("8 layers", "24 layers")
            for depth in (0.5, 1.0)
        ]
    )
    figure = plots.similarities(table)
    assert [text.get_text() for text in figure.legends[0].texts] == ["8 layers", "24 layers"]
    table = pandas.DataFrame(
        [
            {"logits": kind, "block": 1, "gain": 0.1, "bound": 2.0, "sharp bound": 1.0}
            for kind in ("dot", "l2", "logistic")
        ]
    )
    assert len(plots.logit_kinds(table).axes) == 3


def test_slack_marks_what_is_violated():
    claims = list(statements.LABELS)[:2]
    names = {claim: statements.LABELS[claim] for claim in claims}
    figure = bounds_plots.slack(
        {claims[0]: [-1.0, 2.0], claims[1]: [0.5, 99.0]}, {claims[1]: [1.0]}, {claims[0]: 4.0}, names
    )
    first, second = figure.axes[0].get_yticklabels()
    assert (first.get_fontweight(), second.get_fontweight()) == ("bold", "normal")
    assert [first.get_text(), second.get_text()] == list(names.values())


def test_jacobians_and_diffuse_attention():
    table = pandas.DataFrame(
        [
            {"state": state, "seed": seed, "block": block, "bare": 20.0 + seed, "with skip": 1.0}
            for state in ("before", "after")
            for seed in (0, 1)
            for block in (1, 4)
        ]
    )
    figure = bounds_plots.jacobians(table)
    assert [axis.get_title() for axis in figure.axes] == ["before", "after"] and figure.axes[0].get_ylim()[0] == 0
    assert not figure.axes[1].texts
    figure = bounds_plots.jacobians(table.assign(bare=[math.inf] * 4 + [30.0] * 4))
    assert figure.axes[0].get_ylim()[1] == pytest.approx(1.15 * conditioning.WORST)
    assert [text.get_text() for text in figure.axes[1].texts] == ["rank-deficient"]
    figure = bounds_plots.diffuse(
        tables.diffuse_kappas([0], [1e-3, 1e-2], [64]), tables.diffuse_kappas([0], [1e-2], [16, 32])
    )
    assert all(axis.get_xscale() == axis.get_yscale() == "log" for axis in figure.axes)
