"""Malformed presets, parameters, checkpoints, claims and images: an answer or one line of error, nothing else."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from skiplab.companion import ledger, params
from skiplab.errors import InputError
from skiplab.training import checkpoint, data
from standin import make_folder

DECLARED = params.declarations(
    "a: int = 1  # one\nb: float = 0.5  # half\nc: str = 'x'  # text\nd: list[int] = [1]  # some\n"
    "e: dict = {}  # more\nf: bool = True  # yes\ng: list[float] = [0.1]  # few\nh: list[str] = ['y']  # names"
)
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def or_one_line(function, *arguments):
    """Return what a function returns, or None where it refuses in one line."""
    try:
        return function(*arguments)
    except InputError as error:
        assert str(error) and "\n" not in str(error)
        return None


@FUZZ
@given(st.dictionaries(st.sampled_from([*DECLARED, "z", "aa"]), VALUES, max_size=4))
def test_parameters_have_their_type_or_are_refused(values):
    checked = or_one_line(params.check, values, DECLARED, {"a": params.between(0, 9), "c": params.choice("x", "y")})
    if checked is None:
        return
    assert set(values) <= set(DECLARED)
    for name, value in checked.items():
        kind, _, inner = DECLARED[name].type.rstrip("]").partition("[")
        assert type(value) is (list if inner else TYPES[kind])
        assert not inner or all(type(entry) is TYPES[inner] for entry in value)
    assert 0 <= checked.get("a", 0) <= 9 and checked.get("c", "x") in ("x", "y")


@FUZZ
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | VALUES.map(lambda value: repr(value).encode()))
def test_preset_files_hold_declared_names_or_are_refused(tmp_path, monkeypatch, content):
    path = tmp_path / "preset.yaml"
    path.write_bytes(content)
    monkeypatch.setattr(params, "preset_path", lambda *names: path)
    values = or_one_line(params.preset_values, "01_skip_removal", "gpu", DECLARED)
    assert values is None or set(values) <= set(DECLARED)


@pytest.mark.parametrize(
    "content, message",
    [
        ("a: [1", "is not YAML"),
        ("- a\n- b", "it must hold lines 'name: value'"),
        ("just words", "it must hold lines"),
        ("aa: 1", "did you mean 'a'"),
        ("\x00", "is not YAML"),
        ("3", "it must hold lines"),
        ("a: &x *y", "is not YAML"),
    ],
)
def test_a_preset_file_that_is_none_is_named(tmp_path, monkeypatch, content, message):
    path = tmp_path / "preset.yaml"
    path.write_text(content)
    monkeypatch.setattr(params, "preset_path", lambda *names: path)
    with pytest.raises(InputError) as error:
        params.preset_values("01_skip_removal", "gpu", DECLARED)
    assert message in str(error.value) and "preset.yaml" in str(error.value) and "\n" not in str(error.value)


@FUZZ
@given(st.data())
def test_a_damaged_checkpoint_is_noticed_whatever_byte_it_lost(tmp_path, data):
    path, state = (
        tmp_path / "state.safetensors",
        {"epoch": 3, "model": {"w": torch.arange(6.0)}, "history": [{"loss": 0.5}]},
    )
    checkpoint.write(path, state)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    try:
        found = checkpoint.read(path)
    except checkpoint.CorruptFile as error:
        assert "state.safetensors" in str(error) and "\n" not in str(error)
    else:  # a byte of padding, which means nothing
        assert (
            found["epoch"] == 3
            and torch.equal(found["model"]["w"], torch.arange(6.0))
            and found["history"] == [{"loss": 0.5}]
        )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["PNG", "JPEG", "BMP", "GIF"]), st.integers(0, 2**31), st.floats(0, 1), st.booleans())
def test_a_damaged_image_is_read_or_named(tmp_path, kind, seed, place, cut):
    folder = make_folder(tmp_path / "pictures", {"train/a": 4, "train/b": 4, "test/a": 2, "test/b": 2})
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    content = bytearray(buffer.getvalue())
    index = min(int(place * len(content)), len(content) - 1)
    content = content[:index] if cut else content[:index] + bytes([content[index] ^ 0xA5]) + content[index + 1 :]
    (folder / "train" / "a" / "0.png").write_bytes(bytes(content))
    try:
        loaded = data.load(str(folder), img_size=8, channels=3)
    except InputError as error:
        assert "train/a/0.png" in str(error) and "\n" not in str(error)
    else:
        assert loaded.train.num_images + loaded.validation.num_images == 8


@FUZZ
@given(st.dictionaries(st.sampled_from(["schema", "notebook", "preset", "claims"]), VALUES) | VALUES)
def test_a_ledger_file_with_other_content_is_refused(tmp_path, content):
    (tmp_path / "quick").mkdir(exist_ok=True)
    (tmp_path / "quick" / "01_skip_removal.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        ledger.verdicts(tmp_path)
    assert "01_skip_removal.json" in str(error.value) and "\n" not in str(error.value)
