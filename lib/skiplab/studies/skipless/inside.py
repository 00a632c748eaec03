"""What the skipless initialisation achieves on given data, block by block: Cutting the Skip (arXiv 2510.00345).

For timm's ViTs; everything is computed in float64 on the CPU, at z = LN(x), the tokens as the model's own blocks hand
them on. Biases are left out of the Jacobian (they are zero at initialisation)."""

import itertools
from collections.abc import Iterator, Sequence

import pandas
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab import draws
from skiplab.companion.judging import Measurement, Need
from skiplab.models import create_model, matrices
from skiplab.models.skipless import SkiplessInit, draw_targets, query_key
from skiplab.studies.skipless.jacobians import apart
from skiplab.theory.conditioning import condition_number, singular_values
from skiplab.theory.jacobian import attention_jacobian, jacobian_terms
from skiplab.training.photographs import photographs
from skiplab.transforms.augment import normalise

ORTHOGONAL = 1 + 1e-5  # kappa above which W_V W_O does not count as orthogonal


READINGS = {
    "a Z for each head": {},
    "one Z for all heads": {"heads": "shared"},
    "triples shared out": {"heads": "split"},
            "MLP orthogonal": {"mlp": "orthogonal"}, "MLP as in timm": {"mlp": "default"}}  # fmt: skip


CHOSEN = next(iter(READINGS))  # what SkiplessInit does by default, its MLP scaled


def follow(model: nn.Module, images: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block of a ViT, in float64, with the tokens (B, n, d) that enter it, skips as the model has them."""
    blocks, x = matrices.exact(model, images)
    for block in blocks:
        yield block, x
        x = block(x)


def jacobian(block: Block, z: Tensor, skip: bool) -> Tensor:
    """Return K at one image's normed tokens z (n, d), or K + I with its skip."""
    w = matrices.weights(block)
    k = attention_jacobian(z, w.w_q, w.w_k, w.w_v, w.w_o, w.heads)
    return k + torch.eye(len(k), dtype=k.dtype) if skip else k


def head_products(w_q: Tensor, w_k: Tensor, heads: int) -> Tensor:
    """Return every head's W_Q W_Kᵀ: (h, d, d)."""
    return torch.stack([q @ k.mT for q, k in zip(w_q.chunk(heads, dim=1), w_k.chunk(heads, dim=1), strict=True)])


@torch.no_grad()
def report(model: nn.Module, images: Tensor, tokens: int = 17, jacobians: bool = True) -> pandas.DataFrame:
    """Return a row per block of what its weights and its attention on `images` are like.

    `kappa_vo`      kappa of W_V W_O
    `qk_diagonal`   the mean diagonal entry of the heads' W_Q W_Kᵀ; that of αZ + βI is β
    `qk_spread`     the standard deviation of their other entries; that of αZ + βI is α/√d
    `dominant`      percent of the rows of all logits whose diagonal entry is the largest
    `margin`        the diagonal entry of the logits minus the largest other one of its row, mean
    `weight`        the diagonal entry of A, mean over rows, heads and images
    `log10_kappa_a` median over heads and images of log10 kappa(A); `infinite` counts those below the rank floor
    `log_kappa_k`   ln kappa(K), or of K + I where the block has its skip, at the first image's first `tokens` tokens
    """
    rows = []
    for number, (block, x) in enumerate(follow(model, images), start=1):
        z, w = block.norm1(x), matrices.weights(block)
        logits = matrices.logits(block, z)
        maps = torch.softmax(logits, dim=-1)
        eye = torch.eye(logits.shape[-1], dtype=torch.bool)
        margin = logits.diagonal(dim1=-2, dim2=-1) - logits.masked_fill(eye, -torch.inf).amax(dim=-1)
        kappa, products = condition_number(maps).log10(), head_products(w.w_q, w.w_k, w.heads)
        others = ~torch.eye(products.shape[-1], dtype=torch.bool)
        row = {
            "block": number,
            "kappa_vo": float(condition_number(w.w_v @ w.w_o)),
            "qk_diagonal": float(products.diagonal(dim1=-2, dim2=-1).mean()),
            "qk_spread": float(products[:, others].std()),
            "dominant": 100 * float((margin > 0).double().mean()),
            "margin": float(margin.mean()),
            "weight": float(maps.diagonal(dim1=-2, dim2=-1).mean()),
            "log10_kappa_a": float(kappa.median()),
            "infinite": int(kappa.isinf().sum()),
        }
        if jacobians:
            k = jacobian(block, z[0, :tokens], getattr(block, "sab_skip", True))
            row["log_kappa_k"] = float(condition_number(k).log())
        rows.append(row)
    return pandas.DataFrame(rows)


@torch.no_grad()
def query_key_distances(settings: dict, d: int, heads: int, seeds: Sequence[int]) -> pandas.DataFrame:
    """Return how far each head's W_Q W_Kᵀ, of rank d/heads, is from the αZ + βI it is drawn for: a row per reading.

    `each head` is ‖W_Q^h W_K^hᵀ − (αZ + βI)‖_F/‖αZ + βI‖_F, `all heads` the same of the heads' sum, and `diagonal` the
    mean diagonal entry of a head's product over β; means over heads and seeds. Z, drawn again, is the head's own where
    each has one.
    """
    rows = []
    for name, changes in READINGS.items():
        if "mlp" in changes:
            continue
        init = SkiplessInit(**{**settings, **changes})
        for seed in seeds:
            torch.manual_seed(seed)
            targets = draw_targets(init, d, heads if init.heads == "own" else 1)
            torch.manual_seed(seed)
            products = head_products(*query_key(init, d, heads), heads)
            rows += [
                {
                    "reading": name,
                    "each head": apart(product, target),
                    "all heads": apart(products.sum(dim=0), target),
                    "diagonal": float(product.diagonal().mean()) / init.beta,
                }
                for product, target in zip(products, itertools.cycle(targets))
            ]
    return pandas.DataFrame(rows).groupby("reading", sort=False).mean()


@torch.no_grad()
def depth_spectra(model: nn.Module, images: Tensor, depths: Sequence[int]) -> pandas.DataFrame:
    """Follow the Jacobian through the blocks of a ViT on the first image: a row per depth of `depths`.

    `values` are the singular values of that block's K (K + I with its skip) over the largest, `log_kappa` is its ln
    kappa, and `median` log10 of σ_median/σ_max of the product of the Jacobians of all blocks up to there.
    """
    rows, product = [], None
    for depth, (block, x) in enumerate(follow(model, images[:1]), start=1):
        k = jacobian(block, block.norm1(x)[0], getattr(block, "sab_skip", True))
        product = k if product is None else k @ product
        product = product / matrix_norm(product)
        if depth in depths:
            values, through = singular_values(k), singular_values(product)
            rows.append(
                {
                    "depth": depth,
                    "values": (values / values[0]).tolist(),
                    "log_kappa": float(condition_number(k).log()),
                    "median": float((through[len(through) // 2] / through[0]).clamp(min=1e-300).log10()),
                }
            )
    return pandas.DataFrame(rows)


@torch.no_grad()
def two_terms(model: nn.Module, images: Tensor) -> dict[str, float | str]:
    """Return the sizes (Frobenius) and ln kappa of K's two terms and of K: first block, first image.

    `larger` names the dominant one, `difference` is ln kappa(K) − ln kappa(the larger term), and `margin` the smallest
    singular value of the larger term over the largest of the smaller one, above 1 where proposition 2 speaks.
    """
    block, x = next(follow(model, images[:1]))
    w = matrices.weights(block)
    parts = jacobian_terms(block.norm1(x)[0], w.w_q, w.w_k, w.w_v, w.w_o, w.heads)
    terms = dict(zip(("through A", "through V"), parts))
    sizes = {name: float(matrix_norm(term)) for name, term in terms.items()}
    kappas = {name: float(condition_number(term).log()) for name, term in (terms | {"K": sum(terms.values())}).items()}
    larger, smaller = sorted(sizes, key=sizes.get, reverse=True)
    margin = float(singular_values(terms[larger])[-1] / singular_values(terms[smaller])[0])
    return (
        {"larger": larger, "difference": kappas["K"] - kappas[larger], "margin": margin}
        | {f"size {name}": size for name, size in sizes.items()}
        | {f"ln κ, {name}": kappa for name, kappa in kappas.items()}
    )


def dominance(terms: pandas.DataFrame) -> Need:
    """Ask, of `two_terms` in columns, a column a seed, for proposition 2's hypothesis in every one."""
    least = float(terms.loc["margin"].astype(float).min())
    return Need(least > 1, f"σ_min of the larger term is {least:.2g} of σ_max of the smaller one")


def orthogonal_cases(models: Sequence[nn.Module]) -> Measurement:
    """Count the layers whose W_V W_O is no multiple of an orthogonal matrix."""
    kappas = []
    for model in models:
        for block in model.blocks:
            w = matrices.weights(block)
            kappas.append(float(condition_number(w.w_v @ w.w_o)))
    return Measurement(
        violations=sum(kappa > ORTHOGONAL for kappa in kappas),
        cases=len(kappas),
        note=f"largest kappa - 1: {max(kappas) - 1:.1e}",
    )


def architecture_cases(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Measurement:
    """Count models whose state dict differs, in a name or a shape, from the same with the default initialisation."""
    shapes = [[{name: tensor.shape for name, tensor in model.state_dict().items()} for model in pair] for pair in pairs]
    differing = sum(one != other for one, other in shapes)
    return Measurement(violations=differing, cases=len(pairs), note="names and shapes compared")


@torch.no_grad()
def first_attention(settings: dict, names: Sequence[str], seeds: Sequence[int]) -> pandas.DataFrame:
    """Return what the first attention layer of initialised timm ViTs does at 224 pixels: a row per model and seed.

    `photographs` is the mean diagonal entry of its maps on the embedded photographs, `independent` the same on
    LayerNormed Gaussian tokens, and `log10_kappa` the median over heads of log10 kappa(A) on the latter.
    """
    pictures = normalise(torch.stack(list(photographs(224).values())), torch.full((3,), 0.5), torch.full((3,), 0.5))
    rows = []
    for name in names:
        for seed in seeds:
            torch.manual_seed(seed)
            model = create_model(name, num_classes=0, depth=1, skip="none", init=SkiplessInit(**settings))
            block, x = next(follow(model, pictures))
            noise = draws.normal(*x[:1].shape, generator=torch.Generator().manual_seed(seed))
            maps, independent = (
                torch.softmax(matrices.logits(block, block.norm1(tokens)), dim=-1) for tokens in (x, noise)
            )
            rows.append(
                {
                    "model": name,
                    "seed": seed,
                    "photographs": float(maps.diagonal(dim1=-2, dim2=-1).mean()),
                    "independent": float(independent.diagonal(dim1=-2, dim2=-1).mean()),
                    "log10_kappa": float(condition_number(independent).log10().median()),
                }
            )
    return pandas.DataFrame(rows)
