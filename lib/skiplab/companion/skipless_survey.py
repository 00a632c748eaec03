"""What notebook 06 measures: the Jacobian's formulas, and what the skipless initialisation achieves on given data.

Cutting the Skip (arXiv 2510.00345). For timm's ViTs; everything is computed in float64 on the CPU, at z = LN(x), the
tokens as the model's own blocks hand them on. Biases are left out of the Jacobian (they are zero at initialisation).
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab import draws
from skiplab.companion import layers, ledger
from skiplab.companion.ledger import Measurement
from skiplab.companion.runs import Run
from skiplab.companion.scaling_survey import place_in_grid
from skiplab.companion.surveys import Draws
from skiplab.models import create_model
from skiplab.models.skipless import SkiplessInit, draw_targets, query_key
from skiplab.theory.conditioning import condition_number, singular_values
from skiplab.theory.jacobian import attention, attention_jacobian, autograd_jacobian, jacobian_terms
from skiplab.training import dino, loop
from skiplab.training.photographs import photographs
from skiplab.transforms.augment import normalise

DIFFERENCE = 1e-6  # relative, above which a formula of the Jacobian counts as violated
ORTHOGONAL = 1 + 1e-5  # kappa above which W_V W_O does not count as orthogonal
READINGS = {"a Z for each head": {}, "one Z for all heads": {"heads": "shared"}, "triples shared out": {"heads": "split"},
            "MLP orthogonal": {"mlp": "orthogonal"}, "MLP as in timm": {"mlp": "default"}}  # fmt: skip
CHOSEN = next(iter(READINGS))  # what SkiplessInit does by default, its MLP scaled

# --- The formulas -----------------------------------------------------------------------------------------------------


def jacobian_cases(cases: int, seed: int = 0) -> dict[str, Measurement]:
    """Try the four statements about the Jacobian on `cases` random layers each; return each one's measurement by its id."""
    tests = {
        "cut.jacobian.formula": _formula,
        "cut.jacobian.skip": _with_skip,
        "cut.jacobian.product": _stacked,
        "cut.jacobian.layernorm": _through_norm,
    }
    return {claim: _count(test, cases, seed) for claim, test in tests.items()}


def _count(test: Callable[[Draws], float], cases: int, seed: int) -> Measurement:
    draws = Draws(seed)
    found = [test(draws) for _ in range(cases)]
    return Measurement(
        violations=sum(not value <= DIFFERENCE for value in found),
        cases=cases,
        note=f"largest relative difference {max(found):.1e}",
    )


def _layer(draws: Draws, d: int, heads: int) -> tuple[Tensor, ...]:
    """Return W_Q, W_K, W_V, W_O of a layer, its attention anything from uniform to sharp."""
    sharpness = 10 ** draws.uniform(-2, 0.5)
    w_q, w_k, w_v, w_o = (draws.normal(d, d) / math.sqrt(d) for _ in range(4))
    return sharpness * w_q, w_k, w_v, w_o


def _shape(draws: Draws) -> tuple[int, int, int]:
    heads = draws.whole(1, 2)
    return draws.whole(2, 6), heads * draws.whole(2, 3), heads


def _apart(found: Tensor, expected: Tensor) -> float:
    return float(matrix_norm(found - expected) / matrix_norm(expected))


def _formula(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    return _apart(attention_jacobian(x, *w, heads), autograd_jacobian(lambda z: attention(z, *w, heads), x))


def _with_skip(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    expected = attention_jacobian(x, *w, heads) + torch.eye(n * d, dtype=x.dtype)
    return _apart(autograd_jacobian(lambda z: z + attention(z, *w, heads), x), expected)


def _stacked(draws: Draws) -> float:
    n, d, heads = _shape(draws)
    x, stack = draws.normal(n, d), [_layer(draws, d, heads) for _ in range(draws.whole(2, 4))]

    def whole(z: Tensor) -> Tensor:
        for w in stack:
            z = attention(z, *w, heads)
        return z

    product, z = torch.eye(n * d, dtype=x.dtype), x
    for w in stack:
        product, z = attention_jacobian(z, *w, heads) @ product, attention(z, *w, heads)
    return _apart(product, autograd_jacobian(whole, x))


def _through_norm(draws: Draws) -> float:
    """Return σ_min/σ_max of the Jacobian of SA(LN(x))."""
    n, d, heads = _shape(draws)
    d = max(d, 3 * heads)  # tokens of two dimensions have no Jacobian but 0 through LayerNorm
    x, w = draws.normal(n, d), _layer(draws, d, heads)
    values = singular_values(
        autograd_jacobian(lambda z: attention(nn.functional.layer_norm(z, (d,), eps=0.0), *w, heads), x)
    )
    return float(values[-1] / values[0])


# --- What the initialisation achieves ---------------------------------------------------------------------------------


def follow(model: nn.Module, images: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block of a ViT, in float64, with the tokens (B, n, d) that enter it, skips as the model has them."""
    blocks, x = layers.exact(model, images)
    for block in blocks:
        yield block, x
        x = block(x)


def jacobian(block: Block, z: Tensor, skip: bool) -> Tensor:
    """Return K at one image's normed tokens z (n, d), or K + I with its skip."""
    w = layers.weights(block)
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
        z, w = block.norm1(x), layers.weights(block)
        logits = layers.logits(block, z)
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
                    "each head": _apart(product, target),
                    "all heads": _apart(products.sum(dim=0), target),
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

    `larger` names the dominant one, and `difference` is ln kappa(K) − ln kappa(the larger term).
    """
    block, x = next(follow(model, images[:1]))
    w = layers.weights(block)
    terms = dict(
        zip(("through A", "through V"), jacobian_terms(block.norm1(x)[0], w.w_q, w.w_k, w.w_v, w.w_o, w.heads))
    )
    sizes = {name: float(matrix_norm(term)) for name, term in terms.items()}
    kappas = {name: float(condition_number(term).log()) for name, term in (terms | {"K": sum(terms.values())}).items()}
    larger = max(sizes, key=sizes.get)
    return (
        {"larger": larger, "difference": kappas["K"] - kappas[larger]}
        | {f"size {name}": size for name, size in sizes.items()}
        | {f"ln κ, {name}": kappa for name, kappa in kappas.items()}
    )


def orthogonal_cases(models: Sequence[nn.Module]) -> Measurement:
    """Count the layers whose W_V W_O is no multiple of an orthogonal matrix."""
    kappas = []
    for model in models:
        for block in model.blocks:
            w = layers.weights(block)
            kappas.append(float(condition_number(w.w_v @ w.w_o)))
    return Measurement(
        violations=sum(kappa > ORTHOGONAL for kappa in kappas),
        cases=len(kappas),
        note=f"largest kappa - 1: {max(kappas) - 1:.1e}",
    )


def architecture_cases(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Measurement:
    """Count the models whose state dict differs, in a name or a shape, from the same with the default initialisation."""
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
                torch.softmax(layers.logits(block, block.norm1(tokens)), dim=-1) for tokens in (x, noise)
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


# --- Training runs ----------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Run], names: Sequence[str]) -> pandas.DataFrame:
    """Return a row per run and epoch: arm, optimiser, seed, steps taken, seconds of training, validation top-1.

    Seconds are those of the epochs, validation included, as each run measured them on one thread of its machine.
    """
    rows = []
    for run, name in zip(runs, names, strict=True):
        taken = json.loads((run.folder / "provenance.json").read_text(encoding="utf-8"))["seconds_per_epoch"]
        steps = loop.dataset(run.config).train.num_images // run.config.batch_size
        rows += [
            {
                "arm": name,
                "optimizer": run.config.optimizer,
                "seed": run.config.seed,
                "steps": steps * row["epoch"],
                "seconds": sum(taken[: row["epoch"]]),
                "validation_top1": row["validation_top1"],
            }
            for row in run.history
        ]
    return pandas.DataFrame(rows)


@torch.no_grad()
def untrained_top1(config: dino.DinoConfig) -> float:
    """Return what `dino.distil` reports as validation_top1, of the model before any training."""
    vit, data = dino.build_vit(config).eval(), loop.dataset(config)
    parts = []
    for split, most in ((data.train, dino.NEIGHBOUR_IMAGES), (data.validation, None)):
        batches = zip(
            range(-(-(most or split.num_images) // loop.EVALUATION_BATCH)), split.batches(loop.EVALUATION_BATCH)
        )
        features, labels = zip(*[(vit(images), classes) for _, (images, classes) in batches])
        parts += [torch.cat(features), torch.cat(labels)]
    return dino.neighbour_top1(*parts)


def neighbours(table: pandas.DataFrame, optimizer: str, depth: int) -> str:
    """Say what DINO did to the nearest neighbours' top-1, mean over seeds: with skips, and without at `depth` blocks.

    `table` has a row per run: those of `runs.table`, and `untrained_top1`.
    """
    rows, parts = table[table.optimizer == optimizer], []
    for title, chosen in {
        "DINO with skips": rows["skip"] == "both",
        f"without, {depth} blocks": (rows["skip"] == "none") & (rows.depth == depth),
    }.items():
        after, before = rows[chosen][["validation_top1", "untrained_top1"]].mean()
        parts.append(f"{title}: k-NN {after:.1f} % after pre-training, {before:.1f} % before")
    return "; ".join(parts)


def own_rates(
    table: pandas.DataFrame, best: Mapping[str, float], arms: Mapping[str, str], optimizers: Mapping[str, str]
) -> list[str]:
    """Say of each optimiser where its `best` rate lies, and what the arms without skips score there and at their own best.

    `table` has a row per arm, optimiser and learning rate; an arm's own best has the highest validation top-1.
    """
    lines, tried = [], set(table.learning_rate)
    for optimizer, title in optimizers.items():
        rows = table[table.optimizer == optimizer]
        there = rows[rows.learning_rate == best[optimizer]].set_index("arm").test_top1
        own = rows.loc[rows.groupby("arm").validation_top1.idxmax()].set_index("arm")
        lines.append(
            f"{title}: the arm with skips is best at {best[optimizer]:g}, {place_in_grid(best[optimizer], tried)}"
        )
        lines += [
            f"  {arms[arm]}: {there[arm]:.1f} % there; at its own best, {own.learning_rate[arm]:g} "
            f"({place_in_grid(own.learning_rate[arm], tried)}), {own.test_top1[arm]:.1f} %"
            for arm in ("default", "init")
        ]
        lines.append(
            f"  so this init adds {there['init'] - there['default']:+.1f} points at the rate of the verdicts, and "
            f"{own.test_top1['init'] - own.test_top1['default']:+.1f} where each arm has its own"
        )
    return lines


def best_reading(table: pandas.DataFrame) -> str:
    """Say which reading has the highest mean test top-1, and by how much: columns reading, seed and test_top1."""
    scores = table.pivot(index="seed", columns="reading", values="test_top1")
    best = scores.mean().idxmax()
    words = {name: "{:.1f} ± {:.1f} %".format(*ledger.mean_sd(scores[name])) for name in (best, CHOSEN)}
    if best == CHOSEN:
        return f"of {len(scores.columns)} readings the chosen one ({CHOSEN}, MLP scaled) is best: {words[best]}"
    ahead = "{:+.1f} ± {:.1f} points".format(*ledger.mean_sd(scores[best] - scores[CHOSEN]))
    return (
        f"of {len(scores.columns)} readings the best is {best}, {words[best]}: {ahead} from the chosen one "
        f"({CHOSEN}, MLP scaled), {words[CHOSEN]}, over {len(scores)} seed(s)"
    )


def spread(table: pandas.DataFrame) -> pandas.Series:
    """Return each seed's largest minus smallest test top-1 over all rows."""
    scores = table.groupby("seed").test_top1
    return scores.max() - scores.min()


# --- Dense tasks ------------------------------------------------------------------------------------------------------

SETS = {"voc2012": "voc", "ade20k": "ade20k", "coco_stuff": "coco_stuff", "coco20k": "coco20k"}  # as claims name them


def dense_table(evaluations: Sequence[Run], pretrained: Mapping[str, Run]) -> pandas.DataFrame:
    """Return a row per evaluation: arm, depth and seed of the model, what it was evaluated on, and the scores.

    `pretrained` maps a run's hash to it. Arms are "skips" and "skipless".
    """
    rows = []
    for run in evaluations:
        model = pretrained[run.config.initial.partition("/")[2]].config
        rows.append(
            {
                "arm": "skips" if model.skip == "both" else "skipless",
                "depth": model.model_args["depth"],
                "seed": model.seed,
                "dense": run.config.dense,
                "discovery": run.config.discovery,
            }
            | {name: run.result.get(name) for name in ("miou_single", "miou_multi", "corloc", "similarity")}
        )
    return pandas.DataFrame(rows)


def dense_values(table: pandas.DataFrame, data: str, depth: int) -> dict[str, pandas.Series]:
    """Return, for every claim that gives a number for a published dense set, the values by seed that decide it.

    `data` is the pre-training set: the paper's numbers are of ImageNet-1K, the reproduction's of Tiny-ImageNet. Models
    are those of the full `depth`.
    """
    known, found = ledger.claims(), {}
    paper = {"imagenet-1k": "cut.dino", "tiny-imagenet": "cut.repro.dino"}.get(data)
    for (arm, dense, discovery), rows in table[table.depth == depth].groupby(["arm", "dense", "discovery"]):
        rows = rows.set_index("seed")
        places = {
            f"{SETS.get(dense)}.single": "miou_single",
            f"{SETS.get(dense)}.multi": "miou_multi",
            f"tokencut.{SETS.get(discovery)}": "corloc",
        }
        if paper == "cut.repro.dino":
            places = {"voc": "miou_single", "tokencut": "corloc"} if "voc2012" in (dense, discovery) else {}
        found |= {
            f"{paper}.{place}.{arm}": rows[column]
            for place, column in places.items()
            if f"{paper}.{place}.{arm}" in known and rows[column].notna().all()
        }
    return found


def difference(table: pandas.DataFrame, metric: str, skipless_depth: int, skips_depth: int) -> pandas.Series:
    """Return the paired difference of a metric by seed: skipless of one depth minus with skips of another."""

    def scores(arm: str, depth: int) -> pandas.Series:
        rows = table[(table.arm == arm) & (table.depth == depth)].dropna(subset=metric)
        return rows.drop_duplicates("seed").set_index("seed")[metric]

    return scores("skipless", skipless_depth) - scores("skips", skips_depth)
