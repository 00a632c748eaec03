"""What notebook 05 measures: AttnScale and FeatScale as stated, what they learn and do to tokens, and what adds up.

The methods are those of Wang, Zheng, Chen, Wang (arXiv 2203.05962), in lib/skiplab/models/scaling.py. The factorial goes beyond
the paper: it crosses their scalings with Token Graying (arXiv 2505.01996) and the skipless initialisation
(arXiv 2510.00345).
"""

import copy
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import pandas
import torch
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab import draws
from skiplab.companion import runs
from skiplab.companion.graying_survey import interleaved, one_thread
from skiplab.companion.ledger import Measurement
from skiplab.companion.runs import Run
from skiplab.companion.surveys import Draws
from skiplab.errors import InputError
from skiplab.models import probe, zoo
from skiplab.models.scaling import apply_scaling, feat_scale, scaling_parameters
from skiplab.theory.conditioning import condition_number, summarise_log_kappa
from skiplab.theory.spectral import dc, hc, signal_spectrum, token_similarity
from skiplab.training import loop

ARMS = {"plain": {}, "AttnScale": {"scaling": "attnscale"}, "FeatScale": {"scaling": "featscale"}}  # model arguments
RESPECTING = "AttnScale, respecting"  # masks and row sums: on Swin and CaiT
ARGUMENTS = ARMS | {RESPECTING: {"scaling": "attnscale", "scaling_form": "respecting"}}
TOLERANCE = 1e-6
ROW_SUM = 1e-3  # how close to 1 a row sum counts as 1
UNDERFLOW = 1e-30  # what a softmax leaves of a masked logit lies far below
SMALL = {  # arguments of small models with 28 px images, one for each family
    "vit": {"patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3},
    "cait": {"patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3},
    "swin": {"patch_size": 2, "window_size": 7, "embed_dim": 24, "depths": (2, 2), "num_heads": (3, 3)},
}


# --- The statements ---------------------------------------------------------------------------------------------------


def attn_scale(attn: Tensor, omega: Tensor) -> Tensor:
    """Return Â = L + (1 + ω)(A − L), L = 11ᵀ/n, of maps (…, h, n, n) and ω (h,), as the paper writes it."""
    low_pass = 1 / attn.shape[-1]
    return low_pass + (1 + omega[:, None, None]) * (attn - low_pass)


def _counted(differences: Sequence[float]) -> Measurement:
    """Count the relative differences above the tolerance."""
    worst = max(differences)
    return Measurement(
        violations=sum(not difference <= TOLERANCE for difference in differences),
        cases=len(differences),
        note=f"largest relative difference {worst:.0e}",
    )


def identity(cases: int, seed: int = 0) -> Measurement:
    """Compare ÂV with (1 + ω)·AV − ω·mean(V) on maps from nearly uniform to nearly one-hot, in float64."""
    draws, differences = Draws(seed), []
    for _ in range(cases):
        h, n, d = draws.whole(1, 4), draws.whole(2, 40), draws.whole(1, 16)
        attn = draws.attention(h, n, sharpness=10 ** draws.uniform(-2, 1.5))
        value, omega = draws.normal(h, n, d), 3 * draws.normal(h)
        formula, gain = attn_scale(attn, omega) @ value, omega[:, None, None]
        short = (1 + gain) * (attn @ value) - gain * value.mean(dim=-2, keepdim=True)
        differences.append(float((formula - short).norm() / formula.norm()))
    return _counted(differences)


def doubled(cases: int, seed: int = 0) -> Measurement:
    """Compare the released DeiT block, which adds s∘DC[X] and t∘HC[X] twice, with FeatScale at 2s and 2t; float64."""
    draws, differences = Draws(seed), []
    for _ in range(cases):
        n, d = draws.whole(2, 40), draws.whole(1, 16)
        x, s, t = draws.tokens(n, d)[None], draws.normal(d), draws.normal(d)
        added = s * dc(x) + t * hc(x)
        released = x + added + added
        differences.append(float((released - feat_scale(x, 2 * s, 2 * t)).norm() / released.norm()))
    return _counted(differences)


def added_parameters(name: str = "deit_small_patch16_224") -> int:
    """Return how many parameters AttnScale adds to a timm model; nothing is allocated."""
    with torch.device("meta"):
        plain, scaled = (zoo.create_model(name, num_classes=1000, scaling=scaling) for scaling in (None, "attnscale"))
    return sum(p.numel() for p in scaled.parameters()) - sum(p.numel() for p in plain.parameters())


@one_thread()
@torch.no_grad()
def neutral(kind: str, cases: int, seed: int = 0) -> Measurement:
    """Count the images on which a new scaling moves an output of a small DeiT, CaiT or Swin, in any of its forms.

    In float64, and with no parameter at its special initial value.
    """
    torch.manual_seed(seed)
    images = draws.normal(math.ceil(cases / len(SMALL)), 1, 28, 28)
    forms = ("released", "respecting") if kind == "attnscale" else ("released",)
    moved = []
    for family, arguments in SMALL.items():
        plain = zoo.create_model(family, num_classes=10, img_size=28, in_chans=1, **arguments).double().eval()
        for parameter in plain.parameters():
            parameter.add_(0.3 * draws.normal(*parameter.shape))
        scaled = [copy.deepcopy(plain) for _ in forms]
        for model, form in zip(scaled, forms):
            apply_scaling(model, kind, form=form)
        outputs = torch.stack([model(images) for model in scaled])
        moved += (outputs - plain(images)).abs().amax(dim=(0, 2)).tolist()
    return Measurement(
        violations=sum(not difference <= TOLERANCE for difference in moved),
        cases=len(moved),
        note=f"largest change {max(moved):.0e}",
    )


@torch.no_grad()
def talking_heads(model: nn.Module, images: Tensor) -> Measurement:
    """Count the mixed maps of a CaiT, one for each image, block and head, all of whose rows sum to 1."""
    sums = []
    for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True):
        if isinstance(block.attn, TalkingHeadAttn):
            mixing = block.attn.proj_w
            mixed = torch.einsum("gh,bhij->bgij", mixing.weight, attn) + mixing.bias[:, None, None]
            sums.append(mixed.sum(dim=-1))
    rows = torch.stack(sums)  # (blocks, B, h, n)
    violated = ((rows - 1).abs() <= ROW_SUM).all(dim=-1)
    return Measurement(
        violations=int(violated.sum()),
        cases=violated.numel(),
        note=f"rows of a mixed map sum to {float(rows.min()):.3g} up to {float(rows.max()):.3g}",
    )


@torch.no_grad()
def shifted_windows(model: nn.Module, images: Tensor) -> Measurement:
    """Count the masked pairs of tokens in the shifted windows of a Swin with AttnScale whose scaled weight is 0.

    Heads whose ω is 0 are left out.
    """
    weights = []
    for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True):
        if block.attn_mask is not None:
            one_hot = torch.eye(attn.shape[-1]).expand_as(attn)
            low_pass = block.attn.low_pass(one_hot, block.attn_mask)  # L itself
            scaled = attn + block.attn.omega[:, None, None] * (attn - low_pass)
            apart = (block.attn_mask != 0).repeat(len(attn) // len(block.attn_mask), 1, 1)[:, None]
            meant = apart & (block.attn.omega != 0)[:, None, None]
            weights.append(scaled[meant.expand_as(scaled)].abs())
    if not weights:
        raise InputError("this model has no shifted windows; give a Swin whose image is larger than its windows")
    weight = torch.cat(weights)
    note = (
        f"weights of masked pairs: {float(weight.min()):.0e} to {float(weight.max()):.0e}"
        if len(weight)
        else "every ω is 0"
    )
    return Measurement(violations=int((weight <= UNDERFLOW).sum()), cases=len(weight), note=note)


# --- The runs ---------------------------------------------------------------------------------------------------------

Configure = Callable[[str, float, int], loop.TrainConfig]  # arm, learning rate, seed


def tune(configure: Configure, rates: Sequence[float], seeds: Sequence[int], **store: object) -> list[Run]:
    """Train the plain arm at every learning rate; return its runs at the best, one a seed.

    The best has the highest mean validation top-1. `store` goes to `runs.load_or_run`: workers and report.
    """
    found = runs.load_or_run(loop.train, [configure("plain", rate, seed) for rate in rates for seed in seeds], **store)
    best = runs.table(found).groupby("learning_rate").validation_top1.mean().idxmax()
    return [run for run in found if run.config.learning_rate == best]


def place_in_grid(rate: float, rates: Collection[float]) -> str:
    """Say where a learning rate lies among those tried: at an edge, what lies beyond might be better."""
    if len(rates) == 1:
        return "the only one tried"
    edges = {max(rates): "the largest tried", min(rates): "the smallest tried"}
    return edges.get(rate, "not at the edge of those tried")


def compare(
    configure: Configure, rates: Sequence[float], seeds: Sequence[int], *, respecting: bool = False, **store: object
) -> dict[str, list[Run]]:
    """Train every arm at the learning rate that `tune` finds for the plain one; return each arm's runs, one a seed.

    With `respecting` AttnScale is also trained in the form that respects masks and row sums.
    """
    plain = tune(configure, rates, seeds, **store)
    rate, scaled = plain[0].config.learning_rate, [arm for arm in (ARGUMENTS if respecting else ARMS) if arm != "plain"]
    found = runs.load_or_run(loop.train, [configure(arm, rate, seed) for arm in scaled for seed in seeds], **store)
    return {"plain": plain} | {arm: found[len(seeds) * place :][: len(seeds)] for place, arm in enumerate(scaled)}


def scores(compared: Mapping[str, Mapping[str, list[Run]]]) -> pandas.DataFrame:
    """Return a row per run of what `compare` found for each model.

    `gain` is top-1 after the last epoch minus that of the plain arm with the same seed, in points.
    """
    table = pandas.concat(
        [
            runs.table(found).assign(model=model, arm=arm)
            for model, arms in compared.items()
            for arm, found in arms.items()
        ],
        ignore_index=True,
    )
    table["final_test_top1"] = pandas.to_numeric(table.final_test_top1)  # None where training broke
    plain = table[table.arm == "plain"].set_index(["model", "seed"]).final_test_top1
    table["gain"] = table.final_test_top1 - plain.loc[list(zip(table.model, table.seed))].to_numpy()
    return table


def better(table: pandas.DataFrame, model: str) -> str:
    """Return which of AttnScale and FeatScale, as released, has the higher mean validation top-1, from `scores`."""
    rows = table[(table.model == model) & table.arm.isin(["AttnScale", "FeatScale"])]
    return rows.groupby("arm").validation_top1.mean().idxmax()


# --- What is learned, and what it does to tokens ----------------------------------------------------------------------


def learned(model: nn.Module) -> pandas.DataFrame:
    """Return the scalings of a model: a row per layer (from 1), scale ("ω", "s", "t") and index (head, or channel)."""
    rows, layers = [], {}
    for name, values in scaling_parameters(model).items():
        scale = {"omega": "ω"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
        layers[scale] = layers.get(scale, 0) + 1
        rows += [
            {"layer": layers[scale], "scale": scale, "index": index, "value": value}
            for index, value in enumerate(values.tolist())
        ]
    if not rows:
        raise InputError(f"this {type(model).__name__} has no scaling")
    return pandas.DataFrame(rows)


def moved(scores: pandas.DataFrame, arms: Mapping[str, Sequence[Run]], model: str) -> str:
    """Say how far a model's scalings moved from 0, on average, and how far apart its arms score: `scores` and `compare`."""
    apart = scores[scores.model == model].groupby("seed").final_test_top1.agg(lambda top1: top1.max() - top1.min())
    scales = pandas.concat(
        [learned(run.load_model()) for arm, found in arms.items() if arm != "plain" for run in found]
    )
    sizes = scales.value.abs().groupby(scales.scale, sort=False).mean()
    return (
        f"{model}: mean "
        + ", ".join(f"|{scale}| {size:.2g}" for scale, size in sizes.items())
        + f"; with the same seed its {len(arms)} arms lie at most {apart.max():.2f} points apart"
    )


def learned_statistics(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return the statistics of the claims anti.learned.*: a row per value of `layers` and seed, a column per claim.

    `table` holds `learned` of the models with AttnScale and with FeatScale, with the columns `layers` and `seed`.
    """
    means = table.groupby(["layers", "seed", "scale", "layer"], sort=False).value.mean().unstack("scale")
    return pandas.DataFrame(
        {
            key: {
                "omega_grows": rank_by_layer(rows["ω"].droplevel(["layers", "seed"])),
                "t_above_s": float((rows["t"] - rows["s"]).mean()),
                "gap_grows": rank_by_layer((rows["t"] - rows["s"]).droplevel(["layers", "seed"])),
            }
            for key, rows in means.groupby(level=["layers", "seed"], sort=False)
        }
    ).T.rename_axis(["layers", "seed"])


def rank_by_layer(values: pandas.Series) -> float:
    """Return Spearman's correlation of a series, indexed by layer, with the layer."""
    return float(values.reset_index(name="value").corr("spearman").loc["layer", "value"])


def acting_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the maps (B, h, n, n) that act in each block of a ViT: AttnScale's Â where it has that, else A."""
    return [
        attn_scale(attn, block.attn.omega.detach()) if hasattr(block.attn, "omega") else attn
        for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True)
    ]


def band_gains(model: nn.Module, images: Tensor) -> Tensor:
    """Return the gain of each band of the acting maps, averaged over images: (L, h, n)."""
    return torch.stack([signal_spectrum(attn).double().mean(dim=0) for attn in acting_maps(model, images)])


def high_pass(gains: Tensor) -> float:
    """Return the mean gain of the upper half of the bands, over blocks and heads, from `band_gains`."""
    return float(gains[..., torch.fft.fftfreq(gains.shape[-1]).abs() > 0.25].mean())


@torch.no_grad()
def by_layer(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return, after each block of a ViT and averaged over images, how alike and how uneven tokens and maps are.

    Columns: `features`, the mean cosine of different tokens; `attention`, that of different rows of the acting maps;
    `hc_share`, ‖HC[X]‖_F/‖X‖_F in percent.
    """
    tokens = _after_blocks(model, probe.branch_outputs(model, images))
    return pandas.DataFrame(
        [
            {
                "layer": layer,
                "features": float(token_similarity(x).mean()),
                "hc_share": _hc_share(x),
                "attention": float(token_similarity(attn).mean()),
            }
            for layer, (x, attn) in enumerate(zip(tokens, acting_maps(model, images), strict=True), start=1)
        ]
    )


def _after_blocks(model: nn.Module, traces: list[probe.BlockTrace]) -> list[Tensor]:
    """Return the tokens (B, n, d) after each block, whichever skips the blocks have."""
    last = traces[-1]
    has_skip = getattr(zoo.blocks(model)[-1][1], "ffn_skip", True)
    return [trace.tokens for trace in traces[1:]] + [last.ffn_with_input if has_skip else last.ffn]


def _hc_share(x: Tensor) -> float:
    return float(100 * (matrix_norm(hc(x)) / matrix_norm(x)).mean())


# --- What they cost ---------------------------------------------------------------------------------------------------


def kept_for_backward(model: nn.Module, images: Tensor) -> float:
    """Return how many MB (10⁶ bytes) a forward pass keeps for the backward pass, the parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images)  # holds what it keeps, so that no two share an address
    del output
    return sum(kept.values()) / 1e6


def step_costs(models: Mapping[str, nn.Module], images: Tensor, device: str, rounds: int) -> pandas.DataFrame:
    """Time a training step (forward, backward, AdamW) of every model in turn: a row per model.

    Columns: `ms`, the median over `rounds`; `ratio`, the median over rounds of its time over the first model's; and
    `kept_mb` as `kept_for_backward` counts. On a CPU one thread's processor time. A GPU's process gets copies of the
    models, which must be picklable: those with both skips are.
    """
    return runs.on_device(device, _step_costs, models, images, device, rounds)


def _step_costs(models: Mapping[str, nn.Module], images: Tensor, device: str, rounds: int) -> pandas.DataFrame:
    images = images.to(device)
    models = {name: model.to(device).train() for name, model in models.items()}
    kept = {name: kept_for_backward(model, images) for name, model in models.items()}
    times = interleaved({name: _step(model, images) for name, model in models.items()}, device, rounds)
    first = times[next(iter(models))]
    return pandas.DataFrame(
        [
            {
                "model": name,
                "ms": 1e3 * statistics.median(times[name]),
                "kept_mb": kept[name],
                "ratio": statistics.median(
                    time / reference for time, reference in zip(times[name], first, strict=True)
                ),
            }
            for name in models
        ]
    )


def _step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


# --- Do the cures add up? ---------------------------------------------------------------------------------------------

CURES = {"graying": "none", "scaling": "none", "init": "timm"}  # each factor with the level that is no cure
NONE = tuple(CURES.values())
NAMES = {
    "dct": "DCT graying",
    "svd": "SVD graying",
    "svd_fast": "fast SVD graying",
    "attnscale": "AttnScale",
    "featscale": "FeatScale",
    "skipless": "skipless init",
}
MEASURES = {
    "top1": "top-1 (%)",
    "log_kappa": "ln κ of SAB outputs",
    "hc_share": "HC share (%)",
    "similarity": "token similarity",
}
SKIPS = {"both": "both skips", "no_sab": "no SAB skip", "no_ffn": "no FFN skip", "none": "no skips"}
SURE = 2.0  # standard deviations that a difference must exceed


@one_thread()
@torch.no_grad()
def model_state(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return what a ViT does to test images, in float64: the columns of MEASURES besides top-1.

    `log_kappa` is the median ln κ of the SAB outputs over images and blocks, of those of full rank (NaN: none), and
    `deficient` the percentage of the others; `hc_share` and `similarity` are means over images, after the last block.
    """
    model = copy.deepcopy(model).double()
    traces = probe.branch_outputs(model, images.double())
    kappa = summarise_log_kappa(torch.cat([condition_number(trace.sab) for trace in traces]))
    last = _after_blocks(model, traces)[-1]
    return {
        "log_kappa": kappa["median_log_kappa"],
        "deficient": 100 * kappa["n_inf"] / kappa["n"],
        "hc_share": _hc_share(last),
        "similarity": float(token_similarity(last).mean()),
    }


def single_effects(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return what each cure alone changes against no cure: a row per skip, seed and cure, a column per measure.

    `table` has a row per run: the columns `skip` and `seed`, those of CURES and those of MEASURES. Raises InputError
    where the run without a cure is missing.
    """
    rows = [
        {"skip": skip, "seed": seed, "cure": NAMES[cure]}
        | {measure: _change(table, measure, skip, seed, levels) for measure in MEASURES}
        for skip, seed, levels in _cells(table)
        for cure in _active(levels)
        if len(_active(levels)) == 1
    ]
    return pandas.DataFrame(rows)


def together(table: pandas.DataFrame) -> pandas.DataFrame:
    """Compare what several cures do to top-1 together with what they do alone: a row per skip, seed and combination.

    `gain` is theirs together over no cure, `parts` the sum of their gains alone and `best` the largest of these, in
    points. `spread` is the standard deviation of gain − parts where that of a run is 1: √(1 + k + (k − 1)²) for k
    cures. `table` is that of `single_effects`, and it raises the same.
    """
    rows = []
    for skip, seed, levels in _cells(table):
        cures = _active(levels)
        if len(cures) > 1:
            alone = [
                _change(
                    table,
                    "top1",
                    skip,
                    seed,
                    tuple(level if level == cure else none for level, none in zip(levels, NONE)),
                )
                for cure in cures
            ]
            rows.append(
                {
                    "skip": skip,
                    "seed": seed,
                    "cures": " + ".join(NAMES[cure] for cure in cures),
                    "gain": _change(table, "top1", skip, seed, levels),
                    "parts": sum(alone),
                    "best": max(alone),
                    "spread": math.sqrt(1 + len(cures) + (len(cures) - 1) ** 2),
                }
            )
    return pandas.DataFrame(rows)


def adding_up(comparison: pandas.DataFrame, sd: float) -> pandas.DataFrame:
    """Count, by skip, how the combinations of `together` compare with their parts, averaged over seeds.

    `sd` is that of one run's top-1; differences up to SURE standard deviations count as none.
    """
    grouped = comparison.groupby(["skip", "cures"], sort=False)
    mean = grouped[["gain", "parts", "best", "spread"]].mean()
    one = SURE * sd / grouped.size() ** 0.5
    excess, margin = mean.gain - mean.parts, one * mean.spread
    counts = pandas.DataFrame(
        {
            "more than the sum": excess > margin,
            "not told from the sum": excess.abs() <= margin,
            "less than the sum": excess < -margin,
            "better than the best alone": mean.gain - mean.best > one * math.sqrt(2),
            "combinations": True,
        }
    )
    return counts.groupby(level="skip", sort=False).sum()


def supported(effects: pandas.DataFrame, comparison: pandas.DataFrame, sd: float) -> list[str]:
    """Say what `single_effects` and `together` support of top-1, and from how many points on, `sd` being that of one run."""
    if not sd:
        return ["the noise of a run is not known, so nothing can be told from it: give more than one seed"]
    one = SURE * sd / comparison.seed.nunique() ** 0.5
    alone = one * math.sqrt(2)
    margins = {names.count(" + ") + 1: one * spread for names, spread in zip(comparison.cures, comparison.spread)}
    lines = [
        f"{comparison.seed.nunique()} seed(s), sd of one run {sd:.1f} points: noise hides gains up to {alone:.1f} points, "
        "and distances from the sum up to "
        + ", ".join(f"{margin:.1f} ({cures} cures)" for cures, margin in sorted(margins.items()))
    ]
    for skip, rows in comparison.groupby("skip", sort=False):
        single = effects[effects["skip"] == skip].groupby("cure", sort=False).top1.mean()
        mean = rows.groupby("cures", sort=False)[["gain", "parts", "best", "spread"]].mean()
        beyond, ahead = single[single.abs() > alone], mean[mean.gain - mean.best > alone]
        neither = ((mean.gain - mean.parts).abs() <= one * mean.spread) & ((mean.gain - mean.best).abs() <= alone)
        lines += [
            f"{SKIPS[skip]}: beyond noise alone: "
            + (", ".join(f"{cure} {gain:+.1f}" for cure, gain in beyond.items()) or "no cure"),
            "  better together than the best alone, beyond noise: "
            + ("; ".join(ahead.index) or f"none of {len(mean)}"),
            f"  told neither from the sum nor from the best alone: {neither.sum()} of {len(mean)}, of which these runs do "
            "not say whether the cures add up",
        ]
    return lines


def _cells(table: pandas.DataFrame) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(row.skip, row.seed, tuple(getattr(row, factor) for factor in CURES)) for row in table.itertuples()]


def _active(levels: tuple[str, ...]) -> list[str]:
    return [level for level, none in zip(levels, NONE) if level != none]


def _change(table: pandas.DataFrame, measure: str, skip: str, seed: int, levels: tuple[str, ...]) -> float:
    """Return what the cures of `levels` change in a measure, against no cure."""
    values = table.set_index(["skip", "seed", *CURES])[measure]
    for cell in (levels, NONE):
        if (skip, seed, *cell) not in values.index:
            missing = ", ".join(f"{factor} {level}" for factor, level in zip(CURES, cell))
            raise InputError(
                f"no run with skip {skip}, seed {seed}, {missing}: what cures do together is compared "
                "with each of them alone and with none"
            )
    return float(values[(skip, seed, *levels)] - values[(skip, seed, *NONE)])
