"""Build the static site from the executed notebooks: nothing runs, and nothing on its pages is loaded from elsewhere.

    python -m workflow.site [FOLDER]

Sphinx with myst-nb and sphinx-book-theme. Formulas become MathML, which browsers draw themselves, so no MathJax is
needed; docstrings are shown as they are written. This module is also the Sphinx extension that does both.
"""

import io
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

from skiplab import files
from skiplab.companion import figures, fingerprint, tables
from skiplab.errors import InputError, run_command
from workflow.jobs import BUILD

EXPLORERS = "An explorer needs a kernel: run `make lab`, or `make app` for a class."
CONFIG = {
    "project": "Skip connections, conditioning, low-pass attention",
    "author": "",
    "copyright": "",
    "html_show_copyright": False,
    "html_title": "Skip connections in vision transformers",
    "extensions": ["myst_nb", "sphinx.ext.autodoc", "workflow.site"],
    "html_theme": "sphinx_book_theme",
    "html_theme_options": {
        "use_download_button": True,
        "show_toc_level": 2,
        "home_page_in_toc": True,
        "navbar_persistent": [],
    },
    "html_static_path": ["_static"],
    "html_css_files": ["site.css"],
    "html_math_renderer": "mathml",
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},
    "nb_mime_priority_overrides": [("html", "application/vnd.jupyter.widget-view+json", None)],
    "myst_enable_extensions": ["dollarmath", "amsmath"],
    "myst_heading_anchors": 3,
    "myst_update_mathjax": False,
    "autodoc_default_options": {"members": True, "member-order": "bysource"},
    "suppress_warnings": ["mystnb.unknown_mime_type", "myst.header"],
}
STYLE = """.highlight-text pre {white-space: pre-wrap; font-size: 0.9em}
math {font-size: 1.05em}
div.math {display: block; text-align: center; margin: 1em 0; overflow-x: auto}
table {display: block; overflow-x: auto}
"""


def build(target: Path | None = None) -> str:
    """Write the site into `target` (build/site) and return what to tell the user.

    Raises InputError where a page would load something from elsewhere, or where Sphinx reports a problem.
    """
    target = target or BUILD / "site"
    source = BUILD / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    _write_sources(source)
    shutil.rmtree(target, ignore_errors=True)
    complaints = io.StringIO()
    app = Sphinx(
        source,
        None,
        target,
        BUILD / "site-cache",
        "html",
        confoverrides=CONFIG,
        status=None,
        warning=complaints,
        freshenv=True,
    )
    app.build()
    problems = _without_colours(complaints.getvalue()) + outside(target)
    if problems:
        raise InputError("the site has problems: " + "; ".join(problems))
    return f"{len(list(target.rglob('*.html')))} pages; open {os.path.relpath(target)}/index.html"


def _write_sources(source: Path) -> None:
    """Gather the notebooks, figures and generated pages."""
    names = fingerprint.notebooks()
    for name in names:
        files.write(source / "notebooks" / f"{name}.ipynb", fingerprint.notebook_path(name).read_text(encoding="utf-8"))
    if (files.ROOT / "figures").exists():
        shutil.copytree(
            files.ROOT / "figures", source / "figures", ignore=shutil.ignore_patterns("*.json", *figures.UNCOMMITTED)
        )
    files.write(
        source / "notebooks" / "gallery.md", f"# Gallery\n\nThe figures of the quick preset.\n\n{figures.gallery()}\n"
    )
    files.write(source / "ledger.md", f"# The ledger\n\nThe papers' values beside ours.\n\n{tables.markdown()}\n")
    modules = _modules()
    for module in modules:
        title = f"``{module}``"
        files.write(source / "api" / f"{module}.rst", f"{title}\n{'=' * len(title)}\n\n.. automodule:: {module}\n")
    files.write(source / "_static" / "site.css", STYLE)
    files.write(
        source / "index.md",
        "\n\n".join(
            [
                (files.ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0].strip(),
                EXPLORERS,
                _contents("Notebooks", [f"notebooks/{name}" for name in names]),
                _contents("Results", ["notebooks/gallery", "ledger"]),
                _contents("Library", [f"api/{module}" for module in modules]),
            ]
        )
        + "\n",
    )


def _modules() -> list[str]:
    """Return the names of the library's modules, those that others build on first."""
    order = ("theory", "transforms", "models", "training", "companion", "studies")
    library = files.ROOT / "lib"
    return [
        ".".join(path.relative_to(library).with_suffix("").parts)
        for layer in order
        for path in sorted((library / "skiplab" / layer).rglob("*.py"))
        if path.stem != "__init__"
    ]


def _contents(caption: str, pages: list[str]) -> str:
    lines = "\n".join(pages)
    return f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{lines}\n```"


def outside(folder: Path) -> list[str]:
    """Return a line for everything that a page or style sheet in `folder` would load from another place."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        reader = _Loads()
        reader.feed(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(folder)} loads {address}" for address in reader.addresses]
    for path in sorted(folder.rglob("*.css")):
        loads = re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(folder)} loads {address}" for address in loads]
    return found


class _Loads(HTMLParser):
    """Collects the addresses elsewhere that a browser fetches by itself; a link to follow is none."""

    ATTRIBUTES = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
    NOT_FETCHED = {"canonical", "search", "next", "prev", "index", "author", "license"}

    def __init__(self):
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        address = values.get(self.ATTRIBUTES.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address) and values.get("rel") not in self.NOT_FETCHED:
            self.addresses.append(address)


def _without_colours(text: str) -> list[str]:
    return [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]


# --- The Sphinx extension ---------------------------------------------------------------------------------------------


def setup(app: Sphinx) -> dict:
    """Register formulas as MathML and docstrings as plain text."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", _plain)
    return {"parallel_read_safe": True}


def _mathml(tex: str, **options: bool) -> str:
    """Convert a formula; brackets of a fixed size are left to the browser, which docutils does not know."""
    try:
        return tex2mathml(re.sub(r"\\[bB]igg?[lrm]?(?![a-zA-Z])", "", tex), **options)
    except MathError as error:
        raise InputError(f"the formula {tex!r} cannot be shown without MathJax: {error}") from error


def _inline(writer: object, node: nodes.math) -> None:
    writer.body.append(_mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: object, node: nodes.math_block) -> None:
    writer.body.append(f"<div class='math'>{_mathml(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def _plain(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show a docstring as written: |x| and *, meant for a reader of the source, are markup to Sphinx."""
    lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""]


if __name__ == "__main__":
    sys.exit(run_command(build, *(Path(argument).resolve() for argument in sys.argv[1:2])))
