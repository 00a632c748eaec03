"""Spectra of two trained models of others, measured once with optional packages and stored in data/pretrained.

    python -m skiplab.studies.low_pass.others    measure again and store, as `make pretrained` does

Inputs are the embedded photographs and the sentences in data/pretrained/sentences.txt, one value an input. The figures
are those of Wang, Zheng, Chen, Wang (arXiv 2203.05962): attention spectra by layer and head, similarities by layer.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pandas
import torch
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab import files
from skiplab.companion import fingerprint, provenance
from skiplab.errors import InputError, run_command
from skiplab.models import pretrained, probe
from skiplab.models.pretrained import Trace
from skiplab.theory.spectral import (
    attention_similarity,
    frequency_response,
    low_pass_share,
    signal_spectrum,
    token_similarity,
)
from skiplab.training.photographs import FOLDER as PHOTOGRAPHS
from skiplab.training.photographs import photographs
from skiplab.transforms.graying import patchify

FOLDER = files.ROOT / "data" / "pretrained"
COMMAND = "make pretrained"
# The modules whose change may change a number: another fingerprint of them makes the stored measurement stale.
MEASURING = (
    "skiplab.studies.low_pass.others",
    "skiplab.models.pretrained",
    "skiplab.theory.spectral",
    "skiplab.training.photographs",
)
BINS = 8  # of a sentence's bands above the constant one, since sentences differ in length; each has at least 17 tokens


@dataclass(frozen=True)
class Spectra:
    """What was measured of a model with L layers of h heads.

    `gains` (L, h, bands) are averaged over inputs, `frequencies` (bands,) in cycles per token; `heads` is `by_head`'s
    table, `similarity` is `by_layer`'s; `spectra` (of the ViT) are `photograph_spectra`.
    """

    label: str
    frequencies: Tensor
    gains: Tensor
    heads: pandas.DataFrame
    similarity: pandas.DataFrame
    spectra: dict[str, Tensor]


def load_or_measure(report: Callable[[str], None]) -> dict[str, Spectra]:
    """Return the spectra of both models by name, as stored or measured anew; `report` is told which.

    They are measured where what is stored is damaged or stale. Raises InputError where that is needed and not possible.
    """
    try:
        content = stored()
        made = content["provenance"]
        report(
            f"loaded from data/pretrained/spectra.json, measured at commit "
            f"{made['git']['commit'] or 'unknown':.8} with "
            + ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        )
    except InputError as problem:
        if pretrained.missing():
            raise
        report(f"measured anew: {problem}")
        content = measure()
    return {
        name: Spectra(
            model["label"],
            torch.tensor(model["frequencies"]),
            torch.tensor(model["gains"]),
            pandas.DataFrame(model["heads"]),
            pandas.DataFrame(model["similarity"]),
            {key: torch.tensor(value) for key, value in model["spectra"].items()},
        )
        for name, model in content["models"].items()
    }


def stored() -> dict:
    """Return the stored measurement. Raises InputError, naming the command, where it is damaged or stale."""
    path, sums = FOLDER / "spectra.json", FOLDER / "SHA256SUMS"
    if not (path.exists() and sums.exists() and _sha256(path.read_bytes()) in sums.read_text().split()):
        raise InputError(
            f"data/pretrained/spectra.json is missing or does not match SHA256SUMS; repair it with git "
            f"checkout or {COMMAND}"
        )
    content = json.loads(path.read_text())
    if content["depends_on"] != depends_on():
        raise InputError(
            f"data/pretrained/spectra.json is stale: code or inputs changed; measure again with: {COMMAND}"
        )
    return content


def depends_on() -> dict[str, str]:
    """Return digests of what decides the numbers here: code, and inputs."""
    reached = fingerprint.reached_modules(*MEASURING)
    inputs = [(PHOTOGRAPHS / "SHA256SUMS").read_text(), (FOLDER / "sentences.txt").read_text()]
    return {
        "code": fingerprint.digest({name: reached[name] for name in MEASURING}),
        "inputs": fingerprint.digest(inputs),
    }


@torch.no_grad()
def measure() -> dict:
    """Measure both models. Raises InputError where a package is missing or a file is not the pinned one."""
    images = photographs()
    pixels = torch.stack(list(images.values()))
    vit = pretrained.vit_trace(pixels)
    gains = torch.stack([frequency_response(maps).double().mean(dim=0) for maps in vit.maps])
    n = gains.shape[-1]
    spectra = photograph_spectra(pretrained.vit_input(pixels), pretrained.VIT_PATCH, vit)
    models = {
        "vit": _model(
            "vit",
            list(images),
            torch.arange(n // 2 + 1) / n,
            gains[..., : n // 2 + 1],
            by_head(vit.maps),
            by_layer(vit.tokens[1:], vit.maps),
            spectra,
        )
    }
    sentences = (FOLDER / "sentences.txt").read_text().splitlines()
    traces = [pretrained.text_trace(sentence) for sentence in sentences]
    gains = torch.stack(
        [_binned(torch.cat([frequency_response(maps) for maps in trace.maps]).double()) for trace in traces]
    )
    centres = torch.cat([torch.zeros(1), (torch.arange(BINS) + 0.5) / (2 * BINS)])
    similarity = [by_layer(trace.tokens[1:], trace.maps).assign(input=row) for row, trace in enumerate(traces)]
    models["text"] = _model(
        "text",
        [f"sentence {row}" for row in range(1, len(traces) + 1)],
        centres,
        gains.mean(dim=0),
        pandas.concat([by_head(trace.maps) for trace in traces]),
        pandas.concat(similarity),
        {},
    )
    versions = {name: provenance.versions()[name] for name in ("python", "torch", "numpy")} | pretrained.versions()
    made = {"versions": versions, "git": provenance.git_state(), "machine": provenance.machine("cpu")}
    return {"models": models, "depends_on": depends_on(), "provenance": made | {"weights": pretrained.SHA256}}


def store() -> str:
    """Measure, write spectra.json and SHA256SUMS, and return in words what was written."""
    content = measure()
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"
    files.write(FOLDER / "spectra.json", text)
    names = ("sentences.txt", "spectra.json")
    files.write(FOLDER / "SHA256SUMS", "".join(f"{_sha256((FOLDER / name).read_bytes())}  {name}\n" for name in names))
    return f"data/pretrained/spectra.json: {len(text) / 1000:.0f} kB, " + ", ".join(pretrained.LABELS.values())


def by_head(maps: list[Tensor]) -> pandas.DataFrame:
    """Return how many heads of L layers' maps (B, h, n, n) filter, a row per input.

    In percent of (layer, head) pairs: `low_pass`, whose constant band's gain exceeds the mean over the bands' upper
    half, and `halves`, where it is at least twice that. `kept`: the median over pairs of the upper half's mean gain, in
    percent of the constant band's.
    """
    gains = torch.stack([frequency_response(attn) for attn in maps], dim=1).double()  # (B, L, h, n)
    upper = gains[..., torch.fft.fftfreq(gains.shape[-1]).abs() > 0.25].mean(dim=-1)
    kept = (100 * upper / gains[..., 0]).flatten(1).median(dim=1).values
    return pandas.DataFrame(
        {
            "low_pass": [low_pass_share(each) for each in gains],
            "halves": [low_pass_share(each, 2.0) for each in gains],
            "kept": kept.tolist(),
        }
    )


def by_layer(tokens: list[Tensor], maps: list[Tensor]) -> pandas.DataFrame:
    """Return the mean cosine of different tokens (B, n, d) after each layer, and of its maps' columns (B, h, n, n).

    A row per input and block; `depth` is the share of the layers.
    """
    rows = []
    for block, (x, attn) in enumerate(zip(tokens, maps, strict=True), start=1):
        pairs = zip(token_similarity(x).tolist(), attention_similarity(attn).mean(dim=1).tolist(), strict=True)
        rows += [
            {"input": number, "block": block, "depth": block / len(maps), "features": features, "attention": attention}
            for number, (features, attention) in enumerate(pairs)
        ]
    return pandas.DataFrame(rows)


def ranks(similarity: pandas.DataFrame) -> pandas.DataFrame:
    """Return Spearman's correlation of the block with each similarity of `by_layer`'s table, a row per input."""
    rows = similarity.groupby("input", sort=False)[["block", "features", "attention"]].corr("spearman").block.unstack()
    return rows[["features", "attention"]]


def summary(models: dict[str, tuple[pandas.DataFrame, pandas.DataFrame]]) -> pandas.DataFrame:
    """Return mean ± sd over inputs, a row per model, from the tables of `by_head` and `by_layer`."""
    names = {
        "low_pass": "low-pass heads (%)",
        "halves": "halving heads (%)",
        "kept": "upper half kept (%)",
        "features": "tokens alike with depth (rank correlation)",
        "attention": "columns alike with depth (rank correlation)",
    }
    rows = {}
    for label, (heads, similarity) in models.items():
        values = pandas.concat([heads.reset_index(), ranks(similarity).reset_index()], axis=1)
        digits = {name: 2 if name in ("features", "attention") else 1 for name in names}
        rows[label] = {
            title: f"{values[name].mean():.{digits[name]}f} ± {values[name].std():.{digits[name]}f}"
            for name, title in names.items()
        }
    return pandas.DataFrame(rows).T


def photograph_spectra(pixels: Tensor, patch_size: int, trace: Trace, prefix: int = 1) -> dict[str, Tensor]:
    """Return amplitude spectra of the patches of images (B, C, H, W) as a model sees them, and of its tokens by layer.

    "frequencies" (bands,) in cycles per token, "patches" (1, bands) of the pixels, "tokens" (L + 1, bands), "sab" (L,
    bands), the root mean square over images of ‖(F X)_i‖/‖X‖_F, both signs of a frequency together: a row's squares
    sum to 1. The first `prefix` tokens are no patches and left out.
    """
    patches = patchify(pixels, patch_size)
    n = patches.shape[1]
    inner = {
        name: torch.stack([_amplitudes(x[:, prefix:]) for x in layers])
        for name, layers in (("tokens", trace.tokens), ("sab", trace.sab))
    }
    return {"frequencies": torch.arange(n // 2 + 1) / n, "patches": _amplitudes(patches)[None]} | inner


def energy_shares(spectra: dict[str, Tensor]) -> pandas.DataFrame:
    """Return in percent how much of ‖X‖² lies in the constant band and in the upper half, from `photograph_spectra`."""
    upper = spectra["frequencies"] > 0.25
    rows = {
        "patches": spectra["patches"][0],
        "tokens before block 1": spectra["tokens"][0],
        "tokens after the last block": spectra["tokens"][-1],
        "what SABs add, mean over blocks": spectra["sab"].square().mean(dim=0).sqrt(),
    }
    shares = {name: 100 * row.square() for name, row in rows.items()}
    return pandas.DataFrame(
        {
            name: {"constant band": float(share[0]), "upper half": float(share[upper].sum())}
            for name, share in shares.items()
        }
    ).T


def trace(model: nn.Module, images: Tensor) -> Trace:
    """Return what a ViT of timm does with images (B, C, H, W), in the form of `pretrained.vit_trace`."""
    blocks = probe.branch_outputs(model, images)
    tokens = [block.tokens for block in blocks] + [blocks[-1].ffn_with_input]
    return Trace(probe.attention_maps(model, images), [block.sab for block in blocks], tokens)


def _amplitudes(x: Tensor) -> Tensor:
    shares = (signal_spectrum(x) / matrix_norm(x)[:, None]).square().mean(dim=0)
    n = len(shares)
    shares = shares[: n // 2 + 1].clone()
    shares[1 : (n + 1) // 2] *= 2
    return shares.sqrt()


def _binned(gains: Tensor) -> Tensor:
    """Return gains (…, n) as (…, 1 + BINS): band 0, then the mean over each interval of width 1 / (2 BINS) above it."""
    n = gains.shape[-1]
    band = torch.arange(n // 2 + 1)
    interval = -(-2 * BINS * band // n)  # 0 for band 0, then 1 to BINS
    return torch.stack([gains[..., band[interval == k]].mean(dim=-1) for k in range(BINS + 1)], dim=-1)


def _model(
    name: str,
    inputs: list[str],
    frequencies: Tensor,
    gains: Tensor,
    heads: pandas.DataFrame,
    similarity: pandas.DataFrame,
    spectra: dict[str, Tensor],
) -> dict:
    """Return a model's measurement as JSON takes it, with five digits."""
    tables = {
        "heads": heads.assign(input=inputs),
        "similarity": similarity.assign(input=[inputs[i] for i in similarity.input]),
    }
    return {
        "label": pretrained.LABELS[name],
        "frequencies": _rounded(frequencies.tolist()),
        "gains": _rounded(gains.tolist()),
        **{key: {column: _rounded(table[column].tolist()) for column in table} for key, table in tables.items()},
        "spectra": {key: _rounded(value.tolist()) for key, value in spectra.items()},
    }


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(run_command(store))
