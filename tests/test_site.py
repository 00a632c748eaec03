"""The static site: it builds from the executed notebooks, is complete, and loads nothing from elsewhere.

No browser is needed.
"""

import time

import pytest

from skiplab import files
from skiplab.companion import fingerprint
from workflow import site


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    start = time.process_time()
    site.build(folder)
    return folder, time.process_time() - start


@pytest.mark.slow
def test_the_site_builds_within_a_minute_and_has_every_page(built):
    folder, seconds = built
    assert seconds < 60
    assert site.outside(folder) == []
    for name in fingerprint.notebooks():
        page = (folder / "notebooks" / f"{name}.html").read_text()
        assert "<h1>" in page and "vnd.jupyter.widget" not in page
    assert (folder / "notebooks" / "gallery.html").read_text().count("<img") >= len(
        list((files.ROOT / "figures").glob("*.png"))
    )
    assert "asa.kappa.sab" in (folder / "ledger.html").read_text()
    assert "Return kappa = sigma_max / sigma_min" in (folder / "api" / "skiplab.theory.conditioning.html").read_text()


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.html", "<script src='https://cdn.example/x.js'></script>"),
        ("a.html", "<link rel='stylesheet' href='//cdn.example/x.css'>"),
        ("a.html", "<img src='http://cdn.example/x.png'>"),
        ("a.css", "@import url(https://cdn.example/x.css);"),
        ("a.css", "src: url('https://cdn.example/x.woff')"),
    ],
)
def test_a_load_from_elsewhere_is_found(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(site.outside(tmp_path)) == 1 and "cdn.example" in site.outside(tmp_path)[0]


def test_a_link_to_follow_is_no_load(tmp_path):
    (tmp_path / "a.html").write_text(
        "<a href='https://arxiv.org'>paper</a><link rel='canonical' href='https://example.org/'>"
    )
    assert site.outside(tmp_path) == []
