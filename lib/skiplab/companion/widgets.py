"""The explorers: controls in front of an `Exploration`, with a picture that is replaced in place.

An `Explorer` shows itself in JupyterLab and in Voilà. It computes when a control comes to rest, so that a slider never
queues up pictures, and shows bad input in words, inside. Where there is no kernel, `explorations.strip` stands in.
"""

import html
import io
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

import ipywidgets
import matplotlib
import numpy
import torch
import yaml
from IPython.display import Image as DisplayedImage
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from skiplab.companion import figures
from skiplab.companion.explorations import PICTURE_SIDE, Choice, Exploration, Found, Panel, Slider, strip
from skiplab.companion.params import WORKFLOW_VARIABLE, Parameters
from skiplab.errors import InputError
from skiplab.training import pictures

NOTEBOOK = "notebooks/07_playground.ipynb"
DOTS = 96  # a picture's dots per inch: a browser's, so that 14 points are 14 points on a screen
LOOK = {
    "font.size": 14,
    "axes.titlesize": 14,
    "axes.labelsize": 14,
    "xtick.labelsize": 14,
    "ytick.labelsize": 14,
    "legend.fontsize": 14,
    "lines.linewidth": 2,
    "figure.constrained_layout.use": False,
}
STYLE = """<style>
.explorer {--jp-widgets-font-size: 14pt; --jp-widgets-inline-height: 36px; --jp-widgets-inline-label-width: 15em;
  font-size: 14pt; line-height: 1.4; max-width: 1180px}
.explorer .widget-html-content, .explorer button, .explorer select, .explorer input {font-size: 14pt}
.explorer .widget-readout {min-width: 4em}
.explorer :focus-visible {outline: 3px solid #0173b2; outline-offset: 2px}
.explorer .facts, .explorer .notes, .explorer .problem {padding: 0.2em 0.5em}
.explorer .problem {border-left: 6px solid #d55e00; background: #fff4ec; color: #3d1b00}
.explorer .command {display: block; box-sizing: border-box; width: 100%; margin-bottom: 0.3em; font-family: monospace}
.explorer img {max-width: 100%; height: auto}
</style>"""
COPY = (
    "this.previousElementSibling.select(); document.execCommand('copy'); this.textContent = 'copied'; "
    "setTimeout(() => this.textContent = 'copy these parameters as a papermill command', 2000)"
)
UPLOAD = "my upload"


class Explorer:
    """Controls, picture and numbers of one `exploration`, beginning at `start`.

    `box` holds the widgets; `problem` is what is wrong with the values, empty where nothing is. Raises InputError for a
    `start` that names no control or a value out of its range.
    """

    def __init__(self, exploration: Exploration, start: dict | None = None):
        self.exploration, self.start = exploration, exploration.values(start or {})
        self.found: Found | None = None
        self.problem, self._quiet = "", False
        self.controls = {name: _widget(control, self.start[name]) for name, control in exploration.controls.items()}
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self.canvas, self.axes = _canvas(exploration.panels)
        self.background = self.canvas.copy_from_bbox(self.canvas.figure.bbox)
        self.picture = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.words = ipywidgets.HTML()
        self.command = ipywidgets.HTML()
        reset = ipywidgets.Button(description="reset", tooltip="back to where it started", layout={"height": "40px"})
        reset.on_click(lambda _: self.reset())
        parts = [ipywidgets.HTML(STYLE), *self.controls.values(), self.picture, self.words, reset, self.command]
        self.box = ipywidgets.VBox(parts).add_class("explorer").add_class(f"explorer-{exploration.name}")
        self.update()

    @property
    def values(self) -> dict:
        """Return the value of every control."""
        return {name: control.value for name, control in self.controls.items()}

    def reset(self) -> None:
        """Put every control back to where it started, with one new picture."""
        self._quiet = True
        for name, value in self.start.items():
            self.controls[name].value = value
        self._quiet = False
        self.update()

    def update(self) -> None:
        """Compute and draw what the controls say; show bad input in words instead."""
        self.problem = ""
        try:
            self.found = self.exploration.compute(**self._arguments())
            self.picture.value = self._rendered()
        except InputError as error:
            self.problem = str(error)
        except Exception as error:  # a callback's exception would otherwise vanish in the browser's log
            self.problem = f"this is a mistake in the explorer, not yours: {type(error).__name__}: {error}"
            raise
        finally:
            self._speak()

    def _changed(self, _: dict) -> None:
        if not self._quiet:
            self.update()

    def _arguments(self) -> dict:
        return self.values

    def _notes(self) -> list[str]:
        return []

    def _rendered(self) -> bytes:
        """Return the picture as PNG bytes."""
        self.canvas.restore_region(self.background)
        before = [set(axis.get_children()) for axis in self.axes]
        with matplotlib.rc_context(LOOK):
            self.exploration.draw(self.axes, self.found)
        for axis, kept in zip(self.axes, before):
            new = [artist for artist in axis.get_children() if artist not in kept]
            for artist in sorted(new, key=lambda artist: artist.zorder):
                axis.draw_artist(artist)
                artist.remove()
            if axis.get_legend():
                axis.draw_artist(axis.get_legend())
        buffer = io.BytesIO()
        pixels = Image.fromarray(numpy.asarray(self.canvas.buffer_rgba())).convert("RGB")
        pixels.save(buffer, "png", compress_level=1)
        return buffer.getvalue()

    def _speak(self) -> None:
        """Show the numbers or the problem, and the papermill command."""
        lines = (
            [("problem", self.problem)]
            if self.problem
            else [("facts", fact) for fact in self.exploration.facts(self.found)]
        )
        lines += [("notes", note) for note in self._notes()]
        self.words.value = (
            "<div aria-live='polite'>"
            + "".join(f"<div class='{kind}'>{html.escape(line)}</div>" for kind, line in lines)
            + "</div>"
        )
        self.picture.layout.visibility = "hidden" if self.problem else "visible"
        command = papermill_command(self.exploration.name, self._stored_values(), self.exploration.parameters)
        text = html.escape(command, quote=True)
        self.command.value = (
            f"<input class='command' readonly aria-label='papermill command' value='{text}'> "
            f'<button onclick="{COPY}">copy these parameters as a papermill command</button>'
        )

    def _stored_values(self) -> dict:
        return self.values

    @property
    def instead(self) -> str:
        """Return what stands for the explorer where there is no kernel."""
        return (
            f"Explorer “{self.exploration.title}”: it needs a running kernel. The strip below shows some of its states."
        )

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        """Show the widgets."""
        return self.box._repr_mimebundle_(**kwargs) | {"text/plain": self.instead}


class PictureExplorer(Explorer):
    """An explorer with a control named `picture`, which takes the learner's own picture as well, as `pixels`."""

    def __init__(self, exploration: Exploration, start: dict | None = None):
        self.upload_notes: list[str] = []
        super().__init__(exploration, start)
        self.upload = ipywidgets.FileUpload(
            accept="image/*", description="your own picture", layout={"width": "16em", "height": "40px"}
        )
        self.upload.observe(self._uploaded, "value")
        self.box.children = (*self.box.children[:2], self.upload, *self.box.children[2:])

    def reset(self) -> None:
        """Forget the upload as well."""
        self.upload_notes, self._quiet = [], True
        self.upload.value = ()
        self.controls["picture"].options = self.exploration.controls["picture"].options
        super().reset()

    def load(self, name: str, content: bytes) -> None:
        """Show an uploaded file, or say in words why not."""
        try:
            pixels, notes = read_picture(name, content)
        except InputError as error:
            self.problem = str(error)
            self._speak()
            return
        self.upload_notes, self.uploaded, self._quiet = notes, pixels, True
        choice = self.controls["picture"]
        choice.options = (*self.exploration.controls["picture"].options, UPLOAD)
        choice.value = UPLOAD
        self._quiet = False
        self.update()

    def _uploaded(self, change: dict) -> None:
        if change["new"] and not self._quiet:
            file = change["new"][0]
            self.load(file["name"], bytes(file["content"]))

    def _arguments(self) -> dict:
        values = self.values
        return values | {"pixels": self.uploaded} if values["picture"] == UPLOAD else values

    def _notes(self) -> list[str]:
        return self.upload_notes if self.values["picture"] == UPLOAD and not self.problem else []

    def _stored_values(self) -> dict:
        return {name: value for name, value in self.values.items() if value != UPLOAD}


def show(exploration: Exploration, parameters: Parameters, runs: Sequence[str] = (), start: dict | None = None) -> None:
    """Show an explorer in a notebook and, below it and in the figures folder, its strip, which needs no kernel.

    Only notebook 07 has parameters to `start` an explorer from. In Voilà there is a kernel, and no strip; where the
    workflow executes the notebook for readers, nobody can move a control, and words stand for the explorer.
    """
    explorer = (PictureExplorer if "picture" in exploration.controls else Explorer)(exploration, start)
    if WORKFLOW_VARIABLE in os.environ:
        display({"text/plain": explorer.instead}, raw=True)
    else:
        display(explorer)
    if not os.environ.get("SERVER_SOFTWARE", "").startswith("voila"):
        figure = strip(exploration, start)
        figures.save(figure, f"{parameters.notebook[:2]}_{exploration.name}", parameters, runs)
        display(_small(figure, f"Some states of the explorer “{exploration.title}”"))
        figures.plt.close(figure)


def _small(figure: Figure, words: str) -> DisplayedImage:
    """Return a figure as a picture of 256 colours: a notebook of strips in full would be too large for a repository."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    pixels, buffer = Image.open(buffer).convert("RGB").quantize(256), io.BytesIO()
    pixels.save(buffer, "png", optimize=True)
    return DisplayedImage(buffer.getvalue(), alt=words)


def papermill_command(name: str, values: dict, others: Mapping = {}) -> str:
    """Return the command that runs the playground with an explorer at these values, and `others` parameters."""
    words = [".venv/bin/papermill", NOTEBOOK, "out.ipynb"]
    for parameter, value in {name: values, **others}.items():
        if isinstance(value, dict):
            value = yaml.safe_dump(
                value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True
            ).strip()
        words += ["-p", parameter, str(value)]
    return shlex.join(words)


def read_picture(name: str, content: bytes, side: int = PICTURE_SIDE) -> tuple[torch.Tensor, list[str]]:
    """Return an image file's central square as uint8 (3, side, side), and what had to be changed, in words.

    Raises InputError for a file that is not an image, is damaged, or has too many pixels to be opened safely.
    """
    try:
        image, (width, height) = pictures.read(io.BytesIO(content), draft=2 * side)
    except pictures.Undecodable as error:
        raise InputError(f"{name} {error}") from None
    notes = []
    if image.mode in pictures.DEEP_MODES:
        image = _stretched(image)
        notes.append("more than 8 bits a channel: stretched to 8")
    if pictures.is_transparent(image):
        image = pictures.on_white(image)
        notes.append("transparent: laid on white")
    image = image.convert("RGB")
    pixels = numpy.array(ImageOps.fit(image, (side, side), Image.Resampling.BICUBIC))
    if (pixels == pixels[..., :1]).all():
        notes.append("greyscale: its three channels are equal")
    if (width, height) != (side, side):
        action = "scaled up" if min(width, height) < side else "scaled down"
        notes.insert(0, f"{width} × {height} pixels: central square {action} to {side} × {side}")
    return torch.from_numpy(pixels).movedim(-1, 0).contiguous(), notes


def _stretched(image: Image.Image) -> Image.Image:
    """Return a greyscale image of any depth as 8 bits, from its darkest to its brightest pixel."""
    values = numpy.nan_to_num(numpy.asarray(image, dtype=float))
    low, high = values.min(), values.max()
    return Image.fromarray(numpy.uint8(255 * (values - low) / max(high - low, 1e-300)))


def _widget(control: Slider | Choice, value: object) -> ipywidgets.Widget:
    layout, style = {"width": "40em", "max_width": "100%"}, {"description_width": "15em"}
    if isinstance(control, Choice):
        return ipywidgets.Dropdown(
            options=control.options, value=value, description=control.label, style=style, layout=layout
        )
    kind: Callable = ipywidgets.IntSlider if isinstance(control.step, int) else ipywidgets.FloatSlider
    return kind(
        min=control.low,
        max=control.high,
        step=control.step,
        value=value,
        description=control.label,
        style=style,
        layout=layout,
        continuous_update=False,
    )


def _canvas(panels: Sequence[Panel]) -> tuple[FigureCanvasAgg, list]:
    """Return a canvas on which all that stays the same is drawn: drawing axes takes most of a picture's time."""
    figure = Figure(figsize=(10, 3.5), dpi=DOTS, layout="none")
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(LOOK):
        axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
        figure.subplots_adjust(left=0.07, right=0.98, top=0.9, bottom=0.19, wspace=0.34)
        for panel, axis in zip(panels, axes):
            panel.prepare(axis)
        canvas.draw()
    return canvas, axes
