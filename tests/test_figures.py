"""Figures are saved with where their numbers come from, the same bytes for the same figure."""

import hashlib
import json

import matplotlib
import pandas
import pytest
from PIL import Image

from skiplab import files
from skiplab.companion import figures, fingerprint
from skiplab.companion.params import Parameters


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(fingerprint, "inputs_fingerprint", lambda notebook, preset: f"inputs of {notebook}, {preset}")
    figures.theme()
    return tmp_path


def parameters(preset):
    return Parameters(notebook="01_x", preset=preset, epochs=3, device="cpu", workers=2)


def draw():
    figure, axis = figures.plt.subplots()
    axis.plot([1, 2])
    return figure


def test_a_figure_has_a_sidecar_with_its_provenance(project):
    path = figures.save(draw(), "one", parameters("quick"), ["b", "a"], pdf=True)
    assert path == project / "figures" / "one.png" and path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert sidecar == {
        "notebook": "01_x",
        "preset": "quick",
        "runs": ["a", "b"],
        "inputs": "inputs of 01_x, quick",
        "parameters": {"epochs": 3},
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    with Image.open(path) as image:
        assert image.info["Source"] == sidecar["inputs"]


@pytest.mark.parametrize("preset", ["smoke", "custom", "gpu", "paper"])
def test_only_quick_figures_go_where_the_published_ones_are(project, preset):
    assert figures.save(draw(), "one", parameters(preset)) == project / "figures" / preset / "one.png"


def test_equal_figures_are_equal_files(project):
    contents = [figures.save(draw(), "one", parameters("quick")).read_bytes() for _ in range(2)]
    assert contents[0] == contents[1]


def test_a_readers_matplotlibrc_changes_nothing(project):
    expected = figures.save(draw(), "one", parameters("quick")).read_bytes()
    with matplotlib.rc_context({"savefig.bbox": "tight", "lines.marker": "o", "savefig.facecolor": "black"}):
        figures.theme()
        assert figures.save(draw(), "one", parameters("quick")).read_bytes() == expected


def test_the_gallery_shows_every_quick_figure(project):
    figures.save(draw(), "one", parameters("quick"))
    figures.save(draw(), "two", parameters("smoke"))
    assert figures.gallery().startswith("![one](../figures/one.png)") and "two" not in figures.gallery()


def test_the_phase_diagram_shows_means_and_frames_the_best_cell(project):
    scores = pandas.DataFrame(
        [
            {"skip": arm, "depth": depth, "rate": rate, "top1": 10 * depth + rate + offset}
            for arm in ("both", "none")
            for depth in (1, 2)
            for rate in (3, 4)
            for offset in (-1, 1)
        ]
    )
    figure = figures.phase_diagram(
        scores,
        arm="skip",
        row="depth",
        column="rate",
        value="top1",
        arms={"both": "both skips", "none": "no skips"},
        best=(2, 3),
    )
    first, second = figure.axes[:2]
    assert [axis.get_title() for axis in (first, second)] == ["both skips", "no skips"]
    assert sorted(text.get_text() for text in first.texts) == ["13", "14", "23", "24"]
    (frame,) = first.patches
    assert frame.get_xy() == (0, 1)
    assert "2" == first.get_yticklabels()[1].get_text()
