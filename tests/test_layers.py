"""What notebooks 03 and 04 measure in a ViT's blocks, against timm's own forward and the definitions."""

import math
from dataclasses import replace

import pandas
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from skiplab.companion import fingerprint, params
from skiplab.errors import InputError
from skiplab.models import matrices, probe
from skiplab.studies import subjects
from skiplab.studies.bounds import layers as bounds_layers
from skiplab.studies.low_pass import layers
from skiplab.theory import spectral
from skiplab.theory.spectral import hc, low_pass_share
from skiplab.training import loop

IMAGES = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["plain", "layer scale"])
def model(request):
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=28,
        patch_size=7,
        in_chans=1,
        num_classes=10,
        embed_dim=24,
        depth=3,
        num_heads=3,
        init_values=0.5 if request.param == "layer scale" else None,
    )
    for parameter in model.parameters():  # nothing at its special initial value
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_weights_and_logits_give_the_blocks_own_output(model):
    blocks, x = matrices.exact(model, IMAGES)
    for block in blocks:
        w, z = matrices.weights(block), block.norm1(x)
        maps = torch.softmax(matrices.logits(block, z), dim=-1)
        values = (z @ w.w_v).unflatten(-1, (w.heads, -1)).transpose(1, 2)
        output = (maps @ values).transpose(1, 2).flatten(2) @ w.w_o
        difference = matrices.sab(block, x) - output  # the biases, the same for every token
        torch.testing.assert_close(hc(difference), torch.zeros_like(difference), atol=1e-10, rtol=0)
        inner = torch.nn.functional.gelu(block.norm2(x) @ w.w_up + w.b_up) @ w.w_down
        difference = matrices.ffn(block, x) - inner
        torch.testing.assert_close(hc(difference), torch.zeros_like(difference), atol=1e-10, rtol=0)
        assert torch.equal(torch.cat([w.head(head)[2] for head in range(3)], dim=1), w.w_v)
        x = block(x)


def test_the_model_itself_is_left_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers.hc_by_layer(model, IMAGES)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hc_by_layer_ends_in_the_models_own_tokens(model):
    table = layers.hc_by_layer(model, IMAGES)
    assert len(table) == len(layers.VARIANTS) * 4 * 3 and not table[["above", "above_accumulated"]].any(axis=None)
    blocks, x = matrices.exact(model, IMAGES)
    first = x
    for block in blocks:
        x = block(x)
    expected = (torch.linalg.matrix_norm(hc(x)) / torch.linalg.matrix_norm(first)).log()
    whole = table[(table.variant == "SA + FFN + skip") & (table.layer == 3)]
    assert whole.intensity.tolist() == pytest.approx(expected.tolist())


def test_slopes_leave_out_what_is_rounding():
    rows = [
        {"variant": "a", "layer": layer, "intensity": -12.0 * min(layer, 3), "share": -12.0 * min(layer, 3)}
        for layer in range(7)
    ]
    rows += [{"variant": "b", "layer": layer, "intensity": 0.5 * layer, "share": -1.0} for layer in range(7)]
    slopes = layers.slopes(pandas.DataFrame(rows))
    assert slopes["a"] == pytest.approx(-12) and slopes["b"] == pytest.approx(0.5)


def test_gains_by_part_agree_with_the_layers(model):
    parts = layers.gains_by_part(model, IMAGES)
    table = layers.hc_by_layer(model, IMAGES)
    whole = table[table.variant == "SA + FFN + skip"].groupby("layer").intensity.mean().diff().dropna()
    assert (parts.loc["SAB + skip"] + parts.loc["FFN + skip"]).tolist() == pytest.approx(whole.tolist())
    assert (parts.loc["heads together"] <= math.log(3) / 2).all()


def test_spectra_and_shares(model):
    maps = probe.attention_maps(model, IMAGES)
    gains = layers.band_gains(maps)
    assert gains.shape == (3, 3, 17) and (gains[..., 0] >= 1 - 1e-5).all()
    falling = torch.linspace(1, 0, 9).double()
    low = torch.cat([falling, falling[1:].flip(0)]).expand(2, 2, -1)
    assert low_pass_share(low) == 100 and low_pass_share(1 - low) == 0
    stacked = layers.stacked(maps)
    expected = maps[1].double().mean(dim=1) @ maps[0].double().mean(dim=1)
    torch.testing.assert_close(stacked[1], expected, atol=1e-6, rtol=0)
    assert len(spectral.bands(17)) == 9 and spectral.bands(16)[-1] == 0.5


def test_similarities_and_logits(model):
    table = layers.similarity_by_layer(model, IMAGES)
    assert list(table.block) == [1, 2, 3] and table.depth.iloc[-1] == 1 and table.features.abs().le(1).all()
    kinds = layers.other_logits(model, IMAGES)
    assert (
        len(kinds) == 9 and (kinds.gain <= kinds["sharp bound"]).all() and (kinds["sharp bound"] <= kinds.bound).all()
    )


def test_checks_of_a_model_never_refute_a_repaired_statement(model):
    checks = bounds_layers.check_model(model, IMAGES[:2])
    repaired = checks[~checks.claim.str.contains("as_stated|lambda2|block")]
    assert not repaired.holds.isin([False]).any()
    failed = bounds_layers.failed_hypotheses(checks)
    assert failed["fails in % of cases"].between(1, 100).all()
    square = failed[(failed.claim == "asa.ffn.repaired") & (failed.hypothesis == "weights square")]
    assert square["fails in % of cases"].item() == 100


SMALL = {"embed_dim": 24, "num_heads": 3, "patch_size": 7, "depth": 2}


def small(**arguments):
    return loop.TrainConfig(
        "fashion_mnist",
        "vit",
        seed=0,
        epochs=1,
        learning_rate=1e-3,
        train_images=200,
        test_images=50,
        model_args=SMALL | arguments,
    )


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"attn_layer": "diff", "num_heads": 2}, "attention"),
        ({"scale_attn_norm": True}, "attention"),
        ({"qk_norm": True}, "attention"),
        ({"scaling": "attnscale"}, "attention"),
        ({"scale_mlp_norm": True}, "FFN"),
        ({"act_layer": "relu"}, "FFN"),
        ({"norm_layer": "rmsnorm"}, "normalisation"),
    ],
)
def test_blocks_that_the_theorems_are_not_about_are_refused_before_training(arguments, part):
    with pytest.raises(InputError, match=f"the {part} of this model's blocks are not those of the theorems"):
        subjects.check(small(**arguments))
    model = loop.build_model(small(**arguments))
    with torch.no_grad():  # a scaling is without effect until it is trained
        for parameter in model.parameters():
            parameter += 0.1
    with pytest.raises(InputError, match="not those of the theorems"):
        bounds_layers.check_model(model, IMAGES)


@pytest.mark.parametrize(
    "arguments",
    [{"proj_bias": False}, {"qkv_bias": False}, {"init_values": 1e-5}, {"class_token": False, "global_pool": "avg"}],
)
def test_blocks_without_biases_or_with_layer_scale_are_represented(arguments):
    subjects.check(small(**arguments))
    assert not bounds_layers.check_model(loop.build_model(small(**arguments)), IMAGES[:1]).empty


def test_jacobians_and_wrong_models(model):
    table = bounds_layers.jacobian_kappas(model, IMAGES, 5)
    assert list(table.block) == [1, 2, 3] and (table[["bare", "with skip"]] >= 0).all(axis=None)
    with pytest.raises(InputError, match="no ViT block with one qkv matrix"):
        matrices.weights(torch.nn.Linear(2, 2))


def test_published_models_that_cannot_be_fetched_are_done_without(monkeypatch):
    said = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no network")))
    assert subjects.published(["vit_tiny_patch16_224"], "fashion_mnist", said.append) == []
    assert len(said) == 1 and "vit_tiny_patch16_224 are not available here" in said[0]
    assert subjects.published(["none"], "fashion_mnist", said.append) == [] and len(said) == 1


def test_untrained_models_and_photographs_fit_a_configuration():
    config = loop.TrainConfig(
        "fashion_mnist",
        "vit",
        seed=0,
        epochs=1,
        learning_rate=1e-3,
        model_args={"embed_dim": 24, "num_heads": 3, "patch_size": 7, "depth": 1},
    )
    images = subjects.natural_images(config)
    assert images.shape == (8, 1, 28, 28)
    assert subjects.untrained(config)(images).shape == (8, 10)
    assert subjects.natural_images(replace(config, channels=3, img_size=56)).shape == (8, 3, 56, 56)


@pytest.mark.parametrize(
    "notebook, presets", [("03_low_pass", ("quick", "smoke", "gpu")), ("04_bounds", params.PRESETS)]
)
def test_the_notebooks_look_at_the_models_of_notebook_01(notebook, presets):
    """Another value anywhere would train again what notebook 01 has trained."""
    values = {}
    for name in ("01_skip_removal", notebook):
        (cell,) = (source for source, tags in fingerprint.notebook_code_cells(name) if "parameters" in tags)
        declared = params.declarations(cell)
        defaults = {key: declaration.default for key, declaration in declared.items()}
        values[name] = {preset: defaults | params.preset_values(name, preset, declared) for preset in presets}
    shared = set(loop.TrainConfig.__dataclass_fields__) & set(values[notebook]["quick"])
    assert len(shared) >= 10
    for preset in presets:
        first, other = values["01_skip_removal"][preset], values[notebook][preset]
        for name in shared | {"vit", "vit_args", "depth", "learning_rates", "seeds"} - {"device"}:
            assert first[name] == other[name], (preset, name)
