"""Explorers without a browser: every control changes the picture, every problem is told inside, uploads of any kind."""

import io
import itertools
import shlex
import subprocess
import sys

import numpy
import pytest
import yaml
from PIL import Image

from skiplab import files
from skiplab.companion import widgets
from skiplab.companion.params import Parameters
from skiplab.errors import InputError
from skiplab.studies.playground.explorers import EXPLORATIONS
from test_explorations import UNDEFINED


def make(name, start=None):
    kind = widgets.PictureExplorer if name == "graying" else widgets.Explorer
    return kind(EXPLORATIONS[name], start)


def picture(explorer):
    with Image.open(io.BytesIO(explorer.picture.value)) as image:
        return numpy.asarray(image)


def encoded(image, kind="png"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_every_control_changes_the_picture_and_reset_brings_it_back(name):
    explorer = make(name)
    first = picture(explorer)
    for control, specification in EXPLORATIONS[name].controls.items():
        seen = []
        for value in specification.grid(7):
            explorer.controls[control].value = value
            if not explorer.problem:
                seen.append(explorer.picture.value)
        assert len(set(seen)) >= 2, control
        explorer.reset()
        assert explorer.values == explorer.start and (picture(explorer) == first).all()


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_low_middle_and_high_of_all_controls_together_give_a_picture(name):
    explorer, controls = make(name), EXPLORATIONS[name].controls
    undefined = UNDEFINED.get(name, lambda state: False)
    for values in itertools.product(*(control.grid(3)[:3] for control in controls.values())):
        for control, value in zip(controls, values):
            explorer.controls[control].value = value
        assert bool(explorer.problem) == bool(undefined(explorer.values)), explorer.values
        if not explorer.problem:
            assert picture(explorer).std() > 0 and "class='problem'" not in explorer.words.value
            assert explorer.picture.layout.visibility == "visible" and "class='facts'" in explorer.words.value


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_controls_are_labelled_and_wait_until_they_rest(name):
    explorer = make(name)
    for control in explorer.controls.values():
        assert control.description
        assert getattr(control, "continuous_update", False) is False
    assert "it needs a running kernel" in explorer._repr_mimebundle_()["text/plain"]


def test_a_picture_is_what_drawing_everything_anew_gives():
    """Only what changes is drawn over a stored background; nothing of the last state may stay behind."""
    explorer, other = make("bound"), make("bound", {"alpha": 0.5, "tokens": 40})
    explorer.controls["norm"].value = 0.1
    explorer.controls["alpha"].value, explorer.controls["tokens"].value, explorer.controls["norm"].value = 0.5, 40, 1.0
    assert (picture(explorer) == picture(other)).all()


def test_an_undefined_combination_is_told_in_words_and_the_next_one_is_fine():
    explorer = make("skipless")
    explorer.controls["heads"].value = 5
    assert (
        "5 heads cannot share a width of 16" in explorer.words.value and explorer.picture.layout.visibility == "hidden"
    )
    explorer.controls["heads"].value = 4
    assert (
        not explorer.problem
        and "problem" not in explorer.words.value
        and explorer.picture.layout.visibility == "visible"
    )


def test_a_mistake_of_ours_is_told_and_raised():
    explorer = make("bound")
    explorer.exploration = widgets.Exploration(**vars(explorer.exploration) | {"draw": lambda axes, found: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        explorer.update()
    assert "a mistake in the explorer" in explorer.words.value


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_the_command_names_the_values_and_papermill_would_take_them(name):
    explorer = make(name)
    control = list(explorer.controls)[0]
    explorer.controls[control].value = EXPLORATIONS[name].controls[control].grid(3)[0]
    command = widgets.papermill_command(name, explorer.values)
    value = shlex.split(command)[-1]
    assert yaml.safe_load(value) == explorer.values
    assert EXPLORATIONS[name].values(yaml.safe_load(value)) == explorer.values
    assert command.startswith(f".venv/bin/papermill notebooks/07_playground.ipynb out.ipynb -p {name} ")


def test_the_command_survives_a_shell():
    command = widgets.papermill_command(
        "bound", {"pattern": "two camps", "alpha": 0.5}, {"data": "my $pictures", "epochs": 5}
    )
    shown = subprocess.run(
        command.replace(".venv/bin/papermill", "printf '%s\\n'"), shell=True, capture_output=True, text=True
    )
    assert shown.stdout.splitlines()[-7:] == [
        "{pattern: two camps, alpha: 0.5}",
        "-p",
        "data",
        "my $pictures",
        "-p",
        "epochs",
        "5",
    ]


@pytest.mark.parametrize(
    "environment, seen, absent",
    [
        ({}, {"application/vnd.jupyter.widget-view+json", "image/png"}, set()),
        ({"COMPANION_WORKFLOW": "1"}, {"image/png"}, {"application/vnd.jupyter.widget-view+json"}),
        ({"SERVER_SOFTWARE": "voila/0.5"}, {"application/vnd.jupyter.widget-view+json"}, {"image/png"}),
    ],
)
def test_a_reader_sees_the_strip_a_class_the_explorer(environment, seen, absent, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(
        widgets,
        "display",
        lambda value, **options: shown.append(value if isinstance(value, dict) else value._repr_mimebundle_()),
    )
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(widgets.figures.fingerprint, "inputs_fingerprint", lambda *names: "inputs")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    widgets.show(EXPLORATIONS["bound"], Parameters(notebook="04_bounds", preset="custom"), start={"alpha": 0.5})
    kinds = {kind for bundle in shown for kind in (bundle[0] if isinstance(bundle, tuple) else bundle)}
    assert seen <= kinds and not absent & kinds
    assert (tmp_path / "figures" / "custom" / "04_bound.png").exists() == ("image/png" in seen)


def test_a_parameter_that_only_shares_an_explorers_name_is_no_start(monkeypatch, tmp_path):
    """Notebook 06's `skipless` is its models' initialisation, beyond what the explorer's sliders reach."""
    shown = []
    monkeypatch.setattr(widgets, "display", lambda value, **options: shown.append(getattr(value, "values", None)))
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(widgets.figures.fingerprint, "inputs_fingerprint", lambda *names: "inputs")
    p = Parameters(notebook="06_skipless", preset="custom", skipless={"alpha": 0.5, "beta": 8.0, "c": 1.0})
    widgets.show(EXPLORATIONS["skipless"], p)
    assert shown[0] == EXPLORATIONS["skipless"].values({})
    with pytest.raises(InputError, match="beta is 8.0; allowed: a number from 0.1 to 4.0"):
        widgets.show(EXPLORATIONS["skipless"], p, start=p.skipless)


# --- Uploads ----------------------------------------------------------------------------------------------------------

COLOURS = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=numpy.uint8))


@pytest.mark.parametrize(
    "content, notes",
    [
        (encoded(COLOURS), ["300 × 200 pixels: central square scaled down to 128 × 128"]),
        (encoded(COLOURS.resize((4000, 3000)), "jpeg"), ["4000 × 3000 pixels: central square scaled down"]),
        (encoded(COLOURS.resize((60, 60))), ["60 × 60 pixels: central square scaled up"]),
        (encoded(COLOURS.crop((0, 0, 128, 128))), []),
        (encoded(COLOURS.convert("L")), ["scaled down", "greyscale"]),
        (
            encoded(Image.merge("RGBA", (*COLOURS.split(), COLOURS.getchannel(0)))),
            ["scaled down", "transparent: laid on white"],
        ),
        (encoded(COLOURS.convert("P")), ["scaled down"]),
        (encoded(COLOURS.convert("CMYK"), "tiff"), ["scaled down"]),
        (encoded(COLOURS.convert("1")), ["scaled down", "greyscale"]),
        (
            encoded(Image.fromarray(numpy.linspace(0, 60_000, 128 * 128).reshape(128, 128).astype(numpy.uint16))),
            ["more than 8 bits", "greyscale"],
        ),
        (encoded(COLOURS, "gif"), ["scaled down"]),
        (encoded(COLOURS, "webp"), ["scaled down"]),
    ],
)
def test_any_kind_of_picture_can_be_uploaded(content, notes):
    explorer = make("graying")
    explorer.load("mine", content)
    assert not explorer.problem and explorer.values["picture"] == "my upload"
    assert len(explorer.upload_notes) == len(notes)
    for note, seen in zip(notes, explorer.upload_notes):
        assert note in seen and seen in explorer.words.value


def test_transparent_pixels_become_white():
    pixels, _ = widgets.read_picture("clear", encoded(Image.new("RGBA", (128, 128), (255, 0, 0, 0))))
    assert (pixels == 255).all()


def test_a_photograph_taken_upright_stays_upright():
    image = Image.new("RGB", (128, 128), "black")
    image.paste("white", (0, 0, 128, 64))
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 3  # upside down
    image.save(buffer, "jpeg", exif=exif)
    pixels, _ = widgets.read_picture("phone.jpg", buffer.getvalue())
    assert pixels[:, :32].float().mean() < 30 < 200 < pixels[:, -32:].float().mean()


def bomb():
    """A PNG whose header claims 60,000 × 60,000 pixels."""
    data = bytearray(encoded(Image.new("RGB", (1, 1))))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not an image"),
        (b"hello, this is text", "is not an image"),
        (b"%PDF-1.7 ...", "is not an image"),
        (encoded(COLOURS)[:2000], "damaged or cut short"),
        (encoded(COLOURS, "jpeg")[:600], "damaged or cut short"),
        (bomb(), "far too many pixels"),
    ],
)
def test_what_is_no_picture_is_told_in_words_and_the_explorer_goes_on(content, message):
    explorer = make("graying")
    explorer.load("homework.txt", content)
    assert (
        "homework.txt" in explorer.problem and message in explorer.problem and explorer.problem in explorer.words.value
    )
    explorer.controls["epsilon"].value = 0.5
    assert not explorer.problem and explorer.values["picture"] == "astronaut"


def test_an_upload_is_forgotten_by_reset_and_is_no_part_of_the_command():
    explorer = make("graying", {"picture": "coffee"})
    explorer.load("mine", encoded(COLOURS))
    assert "my upload" not in explorer.command.value and "epsilon: 0.7" in explorer.command.value
    explorer.controls["picture"].value = "rocket"
    assert "scaled" not in explorer.words.value
    explorer.reset()
    assert explorer.values["picture"] == "coffee" and "my upload" not in explorer.controls["picture"].options


def test_a_wrong_start_is_refused():
    with pytest.raises(InputError, match="alpha is 9; allowed: a number from 0.0 to 4.0"):
        make("bound", {"alpha": 9})


def test_explorers_open_without_waiting_for_timm_or_the_training_loop():
    code = (
        "import sys, skiplab.companion.widgets; "
        "print([name for name in ('timm', 'skiplab.training.loop') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=files.ROOT, capture_output=True, text=True).stdout == "[]\n"
