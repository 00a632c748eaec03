"""The embedded photographs are whole, named and of the size asked for."""

import pytest

from skiplab.errors import InputError
from skiplab.training import photographs as module
from skiplab.training.photographs import photographs


@pytest.mark.parametrize("side", [224, 32])
def test_there_are_eight_with_content(side):
    images = photographs(side)
    assert len(images) == 8 and all(image.shape == (3, side, side) for image in images.values())
    assert all(image.float().std() > 5 for image in images.values())


@pytest.mark.parametrize("side", [0, 225])
def test_other_sides_are_refused(side):
    with pytest.raises(InputError, match=f"side is {side}; .* allowed: 1 to 224"):
        photographs(side)


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    (tmp_path / "SHA256SUMS").write_text("0  cat.png\n")
    (tmp_path / "cat.png").write_bytes(b"")
    with pytest.raises(InputError, match="cat.png does not match SHA256SUMS; repair it with git checkout"):
        photographs()
