"""What notebook 05 measures, against numpy and against what the definitions say must come out."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

from skiplab.companion import runs, tuning
from skiplab.errors import InputError
from skiplab.models import attention_maps, blocks, create_model
from skiplab.models.scaling import apply_scaling, scaling_parameters
from skiplab.studies.anti_oversmoothing import adding, costs, identities, layers, outcomes, plots
from skiplab.training import loop

IMAGES = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def small(family, scaling=None, size=28, **more):
    """Build a small model in which nothing has its initial value."""
    torch.manual_seed(0)
    model = create_model(
        family, num_classes=10, img_size=size, in_chans=1, scaling=scaling, **identities.SMALL[family] | more
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_the_statements_hold_where_they_are_theorems():
    for measurement in (
        identities.identity(50),
        identities.doubled(50),
        identities.neutral("attnscale", 12),
        identities.neutral("featscale", 12),
    ):
        assert measurement.violations == 0 and measurement.cases >= 12
        assert "e-" in measurement.note or "0e+00" in measurement.note
    assert identities.added_parameters() == 12 * 6


def test_a_violation_is_counted(monkeypatch):
    monkeypatch.setattr(identities, "attn_scale", lambda attn, omega: attn)
    assert identities.identity(10).violations == 10
    monkeypatch.setattr(identities, "feat_scale", lambda x, s, t: x + s)
    assert identities.doubled(10).violations == 10
    moved = lambda model, kind, form: list(model.parameters())[-1].add_(1)  # noqa: E731, the head's bias
    monkeypatch.setattr(identities, "apply_scaling", moved)
    assert identities.neutral("featscale", 12).violations == 12
    assert identities._counted([float("nan"), 0.0]).violations == 1


def test_attn_scale_against_numpy():
    attn = torch.softmax(torch.randn(2, 3, 5, 5, dtype=torch.float64), dim=-1)
    omega = torch.tensor([0.0, -0.5, 2.0], dtype=torch.float64)
    low_pass = np.ones((5, 5)) / 5
    for image, head in np.ndindex(2, 3):
        expected = low_pass + (1 + omega[head].item()) * (attn[image, head].numpy() - low_pass)
        np.testing.assert_allclose(identities.attn_scale(attn, omega)[image, head], expected, atol=1e-14)


def test_mixed_maps_of_a_cait_do_not_sum_to_one_unless_the_mixing_says_so():
    model = small("cait")
    found = identities.talking_heads(model, IMAGES)
    assert (found.violations, found.cases) == (0, 2 * 3 * 3)
    with torch.no_grad():
        for name, block in blocks(model):
            if "token_only" not in name:
                block.attn.proj_w.weight.copy_(torch.eye(3))
                block.attn.proj_w.bias.zero_()
    assert identities.talking_heads(model, IMAGES).violations == 18


def test_masked_pairs_of_shifted_windows_meet_only_in_the_released_form():
    model = small("swin", "attnscale")
    found = identities.shifted_windows(model, IMAGES)
    assert found.violations == 0 and found.cases > 12
    plain = small("swin")
    apply_scaling(plain, "attnscale", form="respecting")
    plain.load_state_dict(model.state_dict())
    apart = identities.shifted_windows(plain, IMAGES)
    assert apart.violations == apart.cases == found.cases
    with torch.no_grad():
        for omega in scaling_parameters(model).values():
            omega.zero_()
    assert identities.shifted_windows(model, IMAGES).cases == 0
    with pytest.raises(InputError, match="no shifted windows"):
        identities.shifted_windows(small("swin", "attnscale", window_size=14), IMAGES)


def test_learned_scales_are_those_of_the_layers():
    model = small("vit", "featscale")
    table = outcomes.learned(model)
    assert len(table) == 3 * 2 * 24 and list(dict.fromkeys(table.scale)) == ["s", "t"]
    second = table[(table.layer == 2) & (table.scale == "t")].sort_values("index").value
    np.testing.assert_allclose(second, model.blocks[1].attn.t.detach(), rtol=1e-6)
    assert set(outcomes.learned(small("vit", "attnscale")).scale) == {"ω"}
    with pytest.raises(InputError, match="no scaling"):
        outcomes.learned(small("vit"))


def test_rank_by_layer():
    series = pandas.Series([0.1, 0.3, 0.2], index=pandas.Index([1, 2, 3], name="layer"))
    assert outcomes.rank_by_layer(series) == pytest.approx(0.5)
    assert math.isnan(outcomes.rank_by_layer(series * 0))


def test_acting_maps_make_the_blocks_own_output():
    model = small("vit", "attnscale").double()
    images, captured = IMAGES.double(), []
    model.blocks[1].attn.register_forward_hook(lambda module, inputs, output: captured.append((inputs[0], output)))
    maps = layers.acting_maps(model, images)[1]
    attention, (tokens, output) = model.blocks[1].attn, captured[0]
    value = attention.qkv(tokens).unflatten(-1, (3, 3, 8))[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(attention.proj((maps @ value).transpose(1, 2).flatten(2)), output, rtol=1e-9, atol=1e-9)
    plain = small("vit")
    assert all(torch.equal(a, b) for a, b in zip(layers.acting_maps(plain, IMAGES), attention_maps(plain, IMAGES)))


def test_band_gains_and_high_pass_against_numpy():
    model = small("vit", "attnscale")
    maps = layers.acting_maps(model, IMAGES)
    gains = layers.band_gains(model, IMAGES)
    n = maps[0].shape[-1]
    fourier = np.fft.fft(np.eye(n)) / np.sqrt(n)
    response = fourier @ maps[2][:, 1].double().numpy() @ fourier.conj().T
    np.testing.assert_allclose(gains[2, 1], np.linalg.norm(response, axis=-1).mean(axis=0), rtol=1e-5)
    upper = [band for band in range(n) if min(band, n - band) / n > 0.25]
    assert layers.high_pass(gains) == pytest.approx(gains[..., upper].mean().item())


@pytest.mark.parametrize("skip", ["both", "no_sab", "no_ffn", "none"])
def test_by_layer_follows_the_models_own_tokens(skip):
    model = small("vit", skip=skip) if skip == "both" else small("vit", "attnscale", skip=skip)
    with torch.no_grad():
        x, outputs = model._pos_embed(model.patch_embed(IMAGES)), []
        for block in model.blocks:
            x = block(x)
            outputs.append(x.double().numpy())
    table = layers.by_layer(model, IMAGES)
    assert table.layer.tolist() == [1, 2, 3]
    for row, tokens in zip(table.itertuples(), outputs):
        hc = tokens - tokens.mean(axis=1, keepdims=True)
        share = 100 * np.mean(np.linalg.norm(hc, axis=(1, 2)) / np.linalg.norm(tokens, axis=(1, 2)))
        unit = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
        cosines = unit @ unit.transpose(0, 2, 1)
        n = tokens.shape[1]
        alike = np.mean([(cosine.sum() - np.trace(cosine)) / (n * (n - 1)) for cosine in cosines])
        assert (row.hc_share, row.features) == (pytest.approx(share, rel=1e-4), pytest.approx(alike, rel=1e-3))
    state = adding.model_state(model, IMAGES)
    assert state["hc_share"] == pytest.approx(table.hc_share.iloc[-1], rel=1e-4)
    assert state["similarity"] == pytest.approx(table.features.iloc[-1], rel=1e-3)
    expected = torch.cat(list(loop.branch_kappas(model, IMAGES)["sab"].values())).log()
    assert state["log_kappa"] == pytest.approx(expected[expected.isfinite()].quantile(0.5).item())
    assert state["deficient"] == pytest.approx(100 * expected.isinf().double().mean().item())


def test_kept_for_backward_counts_each_tensor_once_and_no_parameter():
    layer = torch.nn.Linear(1000, 1000, bias=False)
    images = torch.randn(50, 1000)
    assert costs.kept_for_backward(layer, images) == pytest.approx(4 * images.numel() / 1e6)
    assert costs.kept_for_backward(torch.nn.Sequential(layer, torch.nn.Tanh()), images) == pytest.approx(
        8 * images.numel() / 1e6
    )


def test_attn_scale_keeps_no_map():
    tall = torch.randn(1, 1, 224, 224)  # 1025 tokens
    models = {
        name: create_model(
            "vit",
            num_classes=10,
            img_size=224,
            in_chans=1,
            patch_size=7,
            embed_dim=24,
            depth=1,
            num_heads=3,
            **arguments,
        )
        for name, arguments in outcomes.ARMS.items()
    }
    kept = {name: costs.kept_for_backward(model, tall) for name, model in models.items()}
    one_map = 4 * 3 * 1025**2 / 1e6
    assert kept["plain"] < kept["AttnScale"] < kept["plain"] + 0.1 * one_map


def test_step_costs_times_each_model_against_the_first():
    models = {"plain": small("vit"), "FeatScale": small("vit", "featscale")}
    before = copy.deepcopy(models["plain"].state_dict())
    table = costs.step_costs(models, IMAGES, "cpu", rounds=3)
    assert table.model.tolist() == ["plain", "FeatScale"] and table.ratio[0] == 1 and (table.ms > 0).all()
    assert any(
        not torch.equal(value, before[name]) for name, value in models["plain"].state_dict().items()
    )  # a real step


def factorial(score):
    """Return a factorial table with `score(skip, *cures)` for each measure."""
    rows = []
    for skip in ("both", "no_sab"):
        for graying in ("none", "dct"):
            for scaling in ("none", "attnscale"):
                for init in ("timm", "skipless"):
                    cures = [level for level in (graying, scaling, init) if level not in ("none", "timm")]
                    rows.append(
                        {"skip": skip, "seed": 0, "graying": graying, "scaling": scaling, "init": init}
                        | dict.fromkeys(adding.MEASURES, score(skip, cures))
                    )
    return pandas.DataFrame(rows)


WORTH = {"dct": 1.0, "attnscale": 3.0, "skipless": 10.0}


def test_cures_that_add_up_are_found_to():
    table = factorial(lambda skip, cures: 50 + sum(WORTH[cure] for cure in cures))
    effects = adding.single_effects(table)
    assert len(effects) == 6 and effects.set_index(["skip", "cure"]).loc[("no_sab", "AttnScale"), "top1"] == 3
    comparison = adding.together(table)
    assert len(comparison) == 8 and (comparison.gain == comparison.parts).all()
    assert comparison.spread.tolist()[:4] == [2, 2, 2, pytest.approx(8**0.5)]
    counts = adding.adding_up(comparison, 0.1)
    assert counts["not told from the sum"].tolist() == [4, 4] and counts["better than the best alone"].tolist() == [
        4,
        4,
    ]


def test_cures_that_do_the_same_thing_are_found_to():
    table = factorial(lambda skip, cures: 50 + max([WORTH[cure] for cure in cures], default=0))
    comparison = adding.together(table)
    assert (comparison.gain == comparison.best).all()
    counts = adding.adding_up(comparison, 0.1)
    assert counts["less than the sum"].tolist() == [4, 4] and counts["better than the best alone"].tolist() == [0, 0]
    assert adding.adding_up(comparison, 10.0)["not told from the sum"].tolist() == [4, 4]  # lost in the noise


def test_what_the_factorial_supports_is_said_from_the_noise_up():
    tables = {
        name: factorial(lambda skip, cures: 50 + worth([WORTH[cure] for cure in cures]))
        for name, worth in (("add", sum), ("same", lambda parts: max(parts, default=0)))
    }
    said = {
        (name, sd): "\n".join(adding.supported(adding.single_effects(table), adding.together(table), sd))
        for name, table in tables.items()
        for sd in (0.1, 1.0, 100.0)
    }
    assert "gains up to 2.8 points" in said["add", 1.0] and "up to 4.0 (2 cures), 5.7 (3 cures)" in said["add", 1.0]
    assert "no SAB skip: beyond noise alone: skipless init +10.0, AttnScale +3.0" in said["add", 1.0]
    assert "; DCT graying + AttnScale" in said["add", 0.1] and "best alone: 0 of 4" in said["add", 0.1]
    assert "beyond noise: none of 4" in said["same", 0.1] and "best alone: 0 of 4" in said["same", 0.1]
    assert "no cure" in said["add", 100.0] and "best alone: 4 of 4" in said["add", 100.0]
    table = tables["add"]
    assert "not known" in adding.supported(adding.single_effects(table), adding.together(table), 0.0)[0]


def test_the_place_of_a_rate_in_its_grid():
    assert [tuning.place_in_grid(rate, [1e-3, 3e-3, 1e-2]) for rate in (1e-3, 3e-3, 1e-2)] == [
        "the smallest tried",
        "not at the edge of those tried",
        "the largest tried",
    ]
    assert tuning.place_in_grid(1e-3, [1e-3]) == "the only one tried"


def test_how_far_scalings_moved():
    models = {"AttnScale": small("cait", "attnscale"), "FeatScale": small("cait", "featscale")}
    with torch.no_grad():
        for model in models.values():
            for name, parameter in scaling_parameters(model).items():
                parameter.fill_({"s": -0.25, "t": 0.125}.get(name.rpartition(".")[2], 0.5))
    arms = {"plain": []} | {
        arm: [SimpleNamespace(load_model=lambda model=model: model)] for arm, model in models.items()
    }
    scores = pandas.DataFrame(
        [
            {"model": model, "seed": seed, "final_test_top1": 50 + seed * gain}
            for model in "ab"
            for seed in (0, 1)
            for gain in ((0, 0.5) if model == "a" else (0, 9))
        ]
    )
    assert outcomes.moved(scores, arms, "a") == (
        "a: mean |ω| 0.5, |s| 0.25, |t| 0.12; with the same seed its 3 arms lie at most 0.50 points apart"
    )


def test_the_spread_of_gain_minus_parts():
    chance = np.random.default_rng(0)
    draws = [adding.together(factorial(lambda skip, cures: chance.normal())) for _ in range(300)]
    excess = pandas.concat(draws).assign(excess=lambda rows: rows.gain - rows.parts).groupby("cures").excess.std()
    expected = draws[0].groupby("cures").spread.first()
    np.testing.assert_allclose(excess, expected[excess.index], rtol=0.1)


def test_a_missing_run_is_named():
    table = factorial(lambda skip, cures: 0.0)
    with pytest.raises(InputError, match="no run with skip both, seed 0, graying none, scaling none, init timm"):
        adding.together(table.drop(index=0))
    with pytest.raises(InputError, match="no run with skip both"):
        adding.single_effects(table.drop(index=0))


def test_learned_statistics():
    rows = [
        {"layers": layers, "seed": 3, "scale": scale, "layer": layer, "index": index, "value": value + noise}
        for layers in ("12", "24")
        for scale, values in {"ω": [1, 3, 2], "s": [0, 0, 0], "t": [1, 2, 3]}.items()
        for layer, value in enumerate(values, start=1)
        for index, noise in enumerate((-5.0, 5.0))
    ]
    found = outcomes.learned_statistics(pandas.DataFrame(rows))
    assert found.loc[("24", 3)].to_dict() == pytest.approx({"omega_grows": 0.5, "t_above_s": 2.0, "gap_grows": 1.0})
    assert len(found) == 2


def fake_run(arm, rate, seed):
    """Return a run whose plain validation score is best at rate 0.1, and whose test score tells its arm and seed."""
    config = loop.TrainConfig(
        "fashion_mnist", "vit", seed=seed, epochs=1, learning_rate=rate, model_args=outcomes.ARGUMENTS[arm]
    )
    test = 10 * seed + list(outcomes.ARGUMENTS).index(arm)
    result = {
        "validation_top1": test - abs(rate - 0.1),
        "final_test_top1": None if seed == 9 else test,
        "divergence": None,
    }
    return runs.Run(config, f"{arm} {rate} {seed}", None, result, [])


def test_compare_tunes_on_the_plain_arm_and_pairs_by_seed(monkeypatch):
    asked = []

    def load_or_run(function, configs, **store):
        asked.append(len(configs))
        names = list(outcomes.ARGUMENTS)
        arms = [names[list(outcomes.ARGUMENTS.values()).index(config.model_args)] for config in configs]
        return [fake_run(arm, config.learning_rate, config.seed) for arm, config in zip(arms, configs)]

    monkeypatch.setattr(runs, "load_or_run", load_or_run)
    arms = outcomes.compare(
        lambda arm, rate, seed: fake_run(arm, rate, seed).config, [0.01, 0.1], [1, 2, 9], respecting=True, workers=0
    )
    assert asked == [6, 9] and list(arms) == [*outcomes.ARMS, outcomes.RESPECTING]
    assert all(
        run.config.learning_rate == 0.1 and run.config.seed == seed
        for found in arms.values()
        for run, seed in zip(found, [1, 2, 9], strict=True)
    )
    assert arms["FeatScale"][1].hash == "FeatScale 0.1 2"
    assert arms[outcomes.RESPECTING][0].hash == "AttnScale, respecting 0.1 1"
    table = outcomes.scores({"a": arms, "b": arms})
    gain = table.set_index(["model", "arm", "seed"]).gain
    assert (gain["b", "FeatScale", 2], gain["a", "plain", 1]) == (2, 0) and math.isnan(gain["a", "AttnScale", 9])
    assert outcomes.better(table, "a") == "FeatScale"


def test_every_figure_is_drawn():
    arms = pandas.DataFrame(
        [
            {"model": model, "arm": arm, "gain": gain}
            for model in ("a", "b")
            for arm in ("AttnScale", "FeatScale")
            for gain in (0.1, -0.2)
        ]
    )
    scales = pandas.concat(
        [
            outcomes.learned(small("vit", kind)).assign(layers=f"{depth} layers")
            for kind in ("attnscale", "featscale")
            for depth in (3, 4)
        ]
    )
    depths = pandas.concat(
        [layers.by_layer(small("vit"), IMAGES).assign(layers="3 layers", arm=arm) for arm in outcomes.ARMS]
    )
    table = factorial(lambda skip, cures: 50.0 + len(cures)).assign(log_kappa=float("nan"))
    comparison, effects = adding.together(table), adding.single_effects(table)
    figures = [
        plots.gains(arms),
        plots.learned(scales),
        plots.by_layer(depths),
        plots.spectra({"plain": layers.band_gains(small("vit"), IMAGES)}),
        plots.factorial(table),
        plots.adding(effects, comparison, 1.0, 2.0),
    ]
    assert all(figure.axes for figure in figures)
    for figure in figures:
        figure.canvas.draw()
        plots.plt.close(figure)
