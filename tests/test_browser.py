"""The explorers as a class meets them: headless Chromium against real JupyterLab and Voilà, and the built site.

Every control is moved to both ends and the middle with the keyboard; the numbers that the page then shows must be those
that the plain functions compute here, and the picture must have changed. A screenshot of each explorer is left in
build/screenshots. They need the machine to themselves, so `make test-browser` runs them and `make test` skips them;
skipped where there is no Chromium, too.
"""

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial

import numpy
import pytest
from PIL import Image

from skiplab import files
from skiplab.companion import explorations, params, widgets
from skiplab.errors import InputError
from skiplab.studies.playground import explorers
from test_site import built  # noqa: F401, a fixture

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = files.ROOT / "build" / "screenshots"
NOTEBOOK = "07_playground.ipynb"
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not there
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
UPLOADS = "".join(*re.findall(r"^UPLOADS := (\w+=)'(.*)'$", (files.ROOT / "Makefile").read_text(), re.MULTILINE))
PATIENCE = 300_000  # milliseconds, for a machine with other things to do

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found"),
    pytest.mark.skipif(
        "COMPANION_BROWSER" not in os.environ, reason="run by make test-browser, on a machine of its own"
    ),
]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        started.close()


def serve(command, folder):
    """Start a Jupyter server in `folder` with the smoke preset; yield its address."""
    port = free_port()
    for name, content in SETTINGS.items():
        files.write(folder / "settings" / f"{name}.jupyterlab-settings", json.dumps(content))
    notebooks = files.make_folder(folder / "notebooks")
    shutil.copy(files.ROOT / "notebooks" / NOTEBOOK, notebooks)
    environment = os.environ | {
        params.PRESET_VARIABLE: "smoke",
        "COMPANION_RUNS": str(folder / "runs"),
        "PYTHONPATH": str(files.ROOT),
        "JUPYTER_PATH": str(files.ROOT / "app"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop(params.WORKFLOW_VARIABLE, None)
    log = open(folder / "server.log", "w")
    server = subprocess.Popen(
        [sys.executable, "-m", *command, f"--port={port}"], cwd=notebooks, env=environment, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/static/favicon.ico", timeout=5)
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(30)
        log.close()


@pytest.fixture(scope="module", params=["lab", "voila"])
def opened(request, browser, tmp_path_factory):
    """The playground, run to its end, in a browser: (where, page, addresses elsewhere that were asked for)."""
    folder = tmp_path_factory.mktemp(request.param)
    lab = [
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.token=",
        "--ServerApp.ip=127.0.0.1",
        "--LabApp.news_url=",
        f"--ServerApp.{UPLOADS}",
    ]
    voila = [
        "voila",
        NOTEBOOK,
        "--no-browser",
        "--Voila.ip=127.0.0.1",
        "--template=offline",
        "--VoilaConfiguration.progressive_rendering=True",
        f"--Voila.{UPLOADS}",
    ]
    servers = serve(lab if request.param == "lab" else voila, folder)
    address = next(servers)
    context = browser.new_context(
        viewport={"width": 1400, "height": 1000}, permissions=["clipboard-read", "clipboard-write"]
    )
    page, elsewhere = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on(
        "request",
        lambda sent: (
            elsewhere.append(sent.url) if not sent.url.startswith((address, "data:", "blob:", "ws:")) else None
        ),
    )
    page.goto(address + (f"/lab/tree/{NOTEBOOK}?reset" if request.param == "lab" else "/"))
    if request.param == "lab":
        run_all(page)
    try:
        page.wait_for_selector(".explorer-training img")
    finally:
        page.screenshot(path=files.make_folder(SHOTS) / f"{request.param}_opened.png")
    yield request.param, page, elsewhere
    context.close()
    servers.close()


def run_all(page):
    """Run all cells in JupyterLab; it loses the command, without a word, while the kernel is not connected."""
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    started = page.locator(".jp-InputPrompt", has_text=re.compile(r"\[[*0-9]+\]"))
    for _ in range(20):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
        page.wait_for_timeout(5000)
        if started.count():
            return


def pixels(explorer):
    """Return what the explorer's picture shows, as text."""
    return explorer.locator("img").evaluate(
        "image => {const canvas = document.createElement('canvas'); canvas.width = image.naturalWidth; "
        "canvas.height = image.naturalHeight; canvas.getContext('2d').drawImage(image, 0, 0); "
        "return canvas.toDataURL()}"
    )


def expected(exploration, state):
    """Return the lines that the explorer must show: the numbers, or the problem."""
    try:
        return exploration.facts(exploration.find(**state))
    except InputError as error:
        return [str(error)]


def settle(page, explorer, exploration, state):
    """Wait until the explorer shows what belongs to `state`; return its picture, None where it has a problem."""
    lines = expected(exploration, state)
    deadline = time.monotonic() + 60
    while (seen := explorer.locator(".facts, .problem").all_text_contents()) != lines:
        assert time.monotonic() < deadline, f"{exploration.name} {state}: {seen}, expected {lines}"
        page.wait_for_timeout(50)
    if explorer.locator(".problem").count():
        return None
    page.wait_for_timeout(100)  # the words and the picture come in two messages
    return pixels(explorer)


def move(explorer, label, control):
    """Yield each value that the control labelled so was given: both ends and the middle, by keyboard."""
    row = explorer.locator(".jupyter-widgets.widget-inline-hbox").filter(
        has=explorer.page.get_by_text(label, exact=True)
    )
    if isinstance(control, explorations.Choice):
        for option in control.options:
            row.locator("select").select_option(str(option))
            yield option
        return
    handle = row.locator(".noUi-handle")
    half = round((control.high - control.low) / control.step / 2)
    for keys in (["Home"], ["PageUp"] * (half // 5) + ["ArrowRight"] * (half % 5), ["End"]):
        for key in keys:
            handle.focus()
            handle.press(key)
        value = float(row.locator(".widget-readout").text_content().replace("−", "-"))
        yield type(control.step)(value)


@pytest.mark.parametrize("name", explorers.EXPLORATIONS)
def test_every_control_at_both_ends_and_the_middle(opened, name):
    where, page, _ = opened
    exploration = explorers.EXPLORATIONS[name]
    explorer = page.locator(f".explorer-{name}")
    explorer.scroll_into_view_if_needed()
    start = exploration.values(params.stored_declarations("07_playground")[name].default)
    first = settle(page, explorer, exploration, start)
    for control, specification in exploration.controls.items():
        seen = []
        for value in move(explorer, specification.label, specification):
            seen.append(settle(page, explorer, exploration, start | {control: value}))
        assert len({picture for picture in seen if picture}) >= 2, control
        explorer.get_by_role("button", name="reset").click()
        assert settle(page, explorer, exploration, start) == first
    explorer.get_by_role("button", name="copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == widgets.papermill_command(name, start)
    explorer.screenshot(path=files.make_folder(SHOTS) / f"{where}_{name}.png")
    no_errors(page)


def test_the_training_replay_scrubs(opened):
    where, page, _ = opened
    explorer = page.locator(".explorer-training")
    seen = {}
    for label, control in (
        ("epoch", explorations.Slider("epoch", 0, 1, 1, 0)),
        ("block", explorations.Slider("block", 1, 2, 1, 2)),
    ):
        for value in move(explorer, label, control):
            page.wait_for_timeout(1000)
            seen[label, value] = pixels(explorer), explorer.locator(".facts").all_text_contents()
    assert seen["epoch", 0] != seen["epoch", 1] and seen["block", 1] != seen["block", 2]
    assert all(len(facts) == 2 and "top-1" in facts[0] for _, facts in seen.values())
    explorer.screenshot(path=files.make_folder(SHOTS) / f"{where}_training.png")
    no_errors(page)


def test_the_learners_own_picture_and_what_is_none(opened, tmp_path):
    where, page, _ = opened
    explorer = page.locator(".explorer-graying")
    before = pixels(explorer)
    Image.radial_gradient("L").resize((700, 500)).save(tmp_path / "mine.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    noise = numpy.random.default_rng(0).integers(0, 256, (2000, 2400, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png", compress_level=0)
    assert (tmp_path / "large.png").stat().st_size > 14e6  # tornado alone ends a connection at 10 MB, without a word
    for name, said in (
        ("notes.txt", "notes.txt is not an image"),
        ("mine.png", "700 × 500 pixels: central square scaled down"),
        ("large.png", "2400 × 2000 pixels: central square scaled down"),
    ):
        with page.expect_file_chooser() as chooser:
            explorer.get_by_role("button", name="your own picture").click()
        chooser.value.set_files(tmp_path / name)
        explorer.get_by_text(said).wait_for()
    page.wait_for_timeout(500)
    assert pixels(explorer) != before and explorer.locator(".problem").count() == 0
    explorer.screenshot(path=files.make_folder(SHOTS) / f"{where}_upload.png")
    explorer.get_by_role("button", name="reset").click()
    no_errors(page)


def no_errors(page):
    assert (
        page.locator(
            "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
        ).count()
        == 0
    )
    assert "Traceback" not in page.inner_text("body") and "a mistake in the explorer" not in page.inner_text("body")


def test_letters_are_large_enough_for_a_projector(opened):
    _, page, _ = opened
    sizes = page.evaluate("""[...document.querySelectorAll('.explorer *')].filter(
        node => node.offsetParent && [...node.childNodes].some(
            child => child.nodeType == 3 && child.textContent.trim())).map(
        node => [node.className, parseFloat(getComputedStyle(node).fontSize)])""")
    assert sizes and not [size for size in sizes if size[1] < 14 * 96 / 72 - 0.01]


def test_nothing_is_asked_of_another_machine(opened):
    assert opened[2] == []


# --- The site ---------------------------------------------------------------------------------------------------------


def test_the_sites_pages_load_nothing_from_elsewhere_and_draw_formulas(built, browser):  # noqa: F811, the fixture
    folder, _ = built
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, asked, failed = f"http://127.0.0.1:{server.server_port}", [], []
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(PATIENCE)
    page.on("request", lambda sent: asked.append(sent.url))
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
    for path in (
        "index.html",
        "ledger.html",
        "notebooks/gallery.html",
        "notebooks/01_skip_removal.html",
        "notebooks/04_bounds.html",
        "notebooks/07_playground.html",
        "api/skiplab.theory.bounds.html",
    ):
        page.goto(f"{address}/{path}")
        page.screenshot(path=files.make_folder(SHOTS) / f"site_{path.replace('/', '_')}.png")
    assert not [url for url in asked if not url.startswith((address, "data:"))] and not failed
    page.goto(f"{address}/notebooks/01_skip_removal.html")
    formula = page.locator("math").first
    assert formula.bounding_box()["height"] > 10 and "\\" not in formula.text_content()
    server.shutdown()
