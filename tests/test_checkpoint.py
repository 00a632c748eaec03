"""Checkpoints give back exactly what was stored, and notice every damaged byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skiplab.training import checkpoint

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner))


@given(state=NESTED)
def test_plain_values_come_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("checkpoint") / "state.safetensors"
    checkpoint.write(path, state)
    assert checkpoint.read(path) == state


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    tensor = (torch.randn(3, 4) * 3).to(dtype)
    state = {"a": [tensor, {7: tensor.T}], "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "same": tensor}
    checkpoint.write(tmp_path / "x", state)
    back = checkpoint.read(tmp_path / "x")
    assert back["a"][0].dtype == dtype and torch.equal(back["a"][0], tensor)
    assert torch.equal(back["a"][1][7], tensor.T)
    assert back["scalar"].shape == () and back["empty"].shape == (0, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3)[:, :1],
        torch.arange(24.0).reshape(2, 4, 3)[:, :, 1:2],
        torch.arange(12.0).as_strided((1, 4), (7, 1)),
        torch.arange(4.0).expand(3, 4),
        torch.arange(8.0)[::2],
    ],
)
def test_slices_come_back_whatever_their_strides(tmp_path, tensor):
    checkpoint.write(tmp_path / "x", [tensor])
    (back,) = checkpoint.read(tmp_path / "x")
    assert torch.equal(back, tensor) and back.stride() == torch.empty(tensor.shape).stride()


def test_tensors_come_back_aligned_as_torch_allocates_them(tmp_path):
    """Matrix products of a tensor that lies elsewhere may round differently."""
    state = [torch.rand(n) for n in range(1, 40)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in state)
    checkpoint.write(tmp_path / "x", state)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in checkpoint.read(tmp_path / "x"))


def test_an_optimiser_resumes_to_the_same_bits(tmp_path):
    def steps(optimizer, weight, count):
        for _ in range(count):
            optimizer.zero_grad()
            (weight**4).sum().backward()
            optimizer.step()

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(optimizer, weight, 3)
    checkpoint.write(tmp_path / "x", {"weight": weight, "optimizer": optimizer.state_dict()})
    stored = checkpoint.read(tmp_path / "x")
    resumed = torch.nn.Parameter(stored["weight"])
    second = torch.optim.AdamW([resumed], lr=0.1)
    second.load_state_dict(stored["optimizer"])
    steps(optimizer, weight, 3)
    steps(second, resumed, 3)
    assert torch.equal(weight, resumed)


def test_every_damaged_byte_is_noticed(tmp_path):
    path = tmp_path / "x"
    checkpoint.write(path, {"weights": torch.arange(6.0), "epoch": 3})
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            back = checkpoint.read(path)
        except checkpoint.CorruptFile:
            continue
        assert torch.equal(back["weights"], torch.arange(6.0)) and back["epoch"] == 3, position


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_a_truncated_file_is_noticed(tmp_path, kept):
    path = tmp_path / "x"
    checkpoint.write(path, {"weights": torch.arange(100.0)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(checkpoint.CorruptFile, match="not a whole checkpoint"):
        checkpoint.read(path)
