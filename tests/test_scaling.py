"""AttnScale and FeatScale against the paper's formulas on materialised maps, written here from the weights alone."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from timm.optim import create_optimizer_v2

from rounding import roundoff
from skiplab.errors import InputError
from skiplab.models import FAMILIES, SKIPS, attention_maps, blocks, branch_outputs, create_model, remove_skips
from skiplab.models.scaling import apply_scaling, check_scaling, feat_scale, load_weights, scaling_parameters
from test_residual import SMALL, images_for

torch.set_num_threads(1)

SCALED = ("vit", "swin", "cait")
VARIANTS = [("attnscale", "released"), ("attnscale", "respecting"), ("featscale", "released")]
CASES = list(itertools.product(SCALED, VARIANTS))
CASES.remove(("vit", ("attnscale", "respecting")))  # the released form again


def plain_model(family, skip="both", **more):
    """Build a float64 model in which no parameter has the value it is initialised with."""
    torch.manual_seed(0)
    model = create_model(family, num_classes=5, in_chans=1, skip=skip, **SMALL[family] | more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # enough for attention that is not uniform
    return model


def scaled_model(family, variant, skip="both", **more):
    """Add a scaling that is not zero."""
    model, (kind, form) = plain_model(family, skip, **more), variant
    apply_scaling(model, kind, form=form)
    with torch.no_grad():
        for number, parameter in enumerate(scaling_parameters(model).values()):
            parameter.copy_(0.5 * torch.sin(torch.arange(len(parameter)) + number + 1.0))
    return model


def scaled_blocks(model):
    return [block for name, block in blocks(model) if "token_only" not in name]


def direct_attn_scale(attn, omega, low_pass=None):
    """Return L + (1 + ω)(A − L) of maps (B, h, n, n), with L = 11ᵀ/n unless given."""
    if low_pass is None:
        low_pass = torch.ones(attn.shape[-2:], dtype=attn.dtype) / attn.shape[-1]
    return low_pass + (1 + omega[:, None, None]) * (attn - low_pass)


def direct_attention(attention, form, x, mask=None, attn_mask=None, is_causal=False):
    """Run any of the three attentions with AttnScale, forming every map."""
    heads, (batch, n, d) = attention.num_heads, x.shape
    linear = F.linear(x, attention.qkv.weight, attention.qkv.bias)
    query, key, value = linear.reshape(batch, n, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    logits = query @ key.mT / (d // heads) ** 0.5
    if isinstance(attention, TalkingHeadAttn):

        def mix(module, maps):
            return torch.einsum("gh,bhij->bgij", module.weight, maps) + module.bias[:, None, None]

        attn, omega = mix(attention.proj_l, logits).softmax(dim=-1), attention.proj_w.omega
        if form == "released":
            attn = direct_attn_scale(mix(attention.proj_w, attn), omega)
        else:
            attn = mix(attention.proj_w, direct_attn_scale(attn, omega))
    else:
        if hasattr(attention, "relative_position_bias_table"):
            bias = attention.relative_position_bias_table[attention.relative_position_index]
            logits = logits + bias.permute(2, 0, 1)
        if mask is not None:
            logits = logits + mask.repeat(batch // len(mask), 1, 1)[:, None]
        attn, low_pass = logits.softmax(dim=-1), None
        if form == "respecting":  # uniform over whatever the map reaches
            reached = (attn > 1e-30).double()
            low_pass = reached / reached.sum(dim=-1, keepdim=True)
        attn = direct_attn_scale(attn, attention.omega, low_pass)
    out = (attn @ value).transpose(1, 2).reshape(batch, n, d)
    return attention.proj_drop(F.linear(out, attention.proj.weight, attention.proj.bias))


def direct_feat_scale(x, s, t, times=1):
    """Add s∘DC and t∘HC of x (B, …, d) to it, `times` times."""
    flat = x.reshape(len(x), -1, x.shape[-1])
    dc = (torch.ones(flat.shape[1], flat.shape[1], dtype=x.dtype) / flat.shape[1]) @ flat
    return x + times * (s * dc + t * (flat - dc)).reshape(x.shape)


def direct_model(model, variant, times=1):
    """Copy a scaled model so that it runs the formulas above; its parameters keep their names."""
    model, (kind, form) = copy.deepcopy(model), variant
    for block in scaled_blocks(model):
        attention = block.attn
        if kind == "attnscale":
            attention.forward = functools.partial(direct_attention, attention, form)
        elif isinstance(block, SwinTransformerBlock):
            path, timm_attn = block.drop_path1, functools.partial(SwinTransformerBlock._attn, block)
            block._attn = lambda x, timm_attn=timm_attn, path=path: direct_feat_scale(
                timm_attn(x), path.s, path.t, times
            )
            path.forward = functools.partial(type(path).__mro__[2].forward, path)  # timm's own
        else:
            timm_class = TalkingHeadAttn if isinstance(attention, TalkingHeadAttn) else Attention
            attention.forward = lambda x, timm_class=timm_class, attention=attention, **options: direct_feat_scale(
                timm_class.forward(attention, x), attention.s, attention.t, times
            )
    return model


def gradients(model, images):
    output = model(images)
    (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum().backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_outputs_and_gradients_are_the_direct_formulas(family, variant, skip):
    model, images = scaled_model(family, variant, skip).eval(), images_for(family)
    expected, expected_gradients = gradients(direct_model(model, variant), images)
    output, actual_gradients = gradients(model, images)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, rtol=1e-8, atol=1e-9, msg=name)
    assert all(actual_gradients[name].abs().min() > 0 for name in scaling_parameters(model))
    assert (plain_model(family, skip).eval()(images) - output).abs().max() > 1e-3  # the scaling does something


def test_vit_attention_against_numpy():
    attention = scaled_model("vit", ("attnscale", "released")).blocks[0].attn
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = {name: parameter.detach().numpy() for name, parameter in attention.named_parameters()}

    def direct(omega):
        qkv = x.numpy() @ weight["qkv.weight"].T + weight["qkv.bias"]
        merged = np.empty((5, 24))
        for head in range(3):
            query, key, value = (qkv[:, start + 8 * head : start + 8 * head + 8] for start in (0, 24, 48))
            attn = np.exp(query @ key.T / np.sqrt(8))
            attn /= attn.sum(axis=1, keepdims=True)
            merged[:, 8 * head : 8 * head + 8] = (1 / 5 + (1 + omega[head]) * (attn - 1 / 5)) @ value
        return merged @ weight["proj.weight"].T + weight["proj.bias"]

    omega = weight["omega"].copy()
    output = attention(x[None])[0]
    np.testing.assert_allclose(output.detach().numpy(), direct(omega), rtol=1e-12, atol=1e-12)
    output.sin().sum().backward()
    for head, step in enumerate(1e-6 * np.eye(3)):
        slope = (np.sin(direct(omega + step)) - np.sin(direct(omega - step))).sum() / 2e-6
        assert attention.omega.grad[head].item() == pytest.approx(slope, rel=1e-6)


def numpy_weights(module):
    return {name: tensor.detach().numpy() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def numpy_softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def numpy_heads(weight, x, heads):
    """Return queries, keys and values of tokens (n, d), each (h, n, d/h)."""
    return (x @ weight["qkv.weight"].T + weight["qkv.bias"]).reshape(len(x), 3, heads, -1).transpose(1, 2, 0, 3)


def numpy_output(weight, maps, values):
    """Apply maps (h, n, n) to values (h, n, d/h), put the heads side by side and project them."""
    merged = np.concatenate([attn @ value for attn, value in zip(maps, values, strict=True)], axis=1)
    return merged @ weight["proj.weight"].T + weight["proj.bias"]


def numpy_attn_scale(maps, omega):
    """Return L + (1 + ω)(A − L) with L = 11ᵀ/n, one ω a head."""
    low_pass = np.full(maps.shape[1:], 1 / maps.shape[-1])
    return np.stack([low_pass + (1 + factor) * (attn - low_pass) for factor, attn in zip(omega, maps, strict=True)])


def test_vit_feat_scale_against_numpy():
    attention = scaled_model("vit", ("featscale", "released")).blocks[0].attn
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = numpy_weights(attention)

    def direct(s, t):
        query, key, value = numpy_heads(weight, x.numpy(), 3)
        plain = numpy_output(weight, numpy_softmax(query @ key.transpose(0, 2, 1) / np.sqrt(8)), value)
        dc = np.full((5, 5), 1 / 5) @ plain
        return plain + s * dc + t * (plain - dc)

    s, t = weight["s"].copy(), weight["t"].copy()
    output = attention(x[None])[0]
    np.testing.assert_allclose(output.detach().numpy(), direct(s, t), rtol=1e-12, atol=1e-12)
    output.sin().sum().backward()
    for feature, step in enumerate(1e-6 * np.eye(24)):
        for gradient, up, down in (
            (attention.s.grad, (s + step, t), (s - step, t)),
            (attention.t.grad, (s, t + step), (s, t - step)),
        ):
            slope = (np.sin(direct(*up)) - np.sin(direct(*down))).sum() / 2e-6
            assert gradient[feature].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_released_swin_attention_against_numpy():
    block = scaled_model("swin", ("attnscale", "released")).layers[0].blocks[1]
    attention, weight = block.attn, numpy_weights(block.attn)
    windows = torch.randn(9, 16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = block.get_attn_mask(windows[0].new_zeros(1, 12, 12, 12)).double()
    assert mask.shape == (9, 16, 16) and (mask != 0).any()
    bias = (
        weight["relative_position_bias_table"][weight["relative_position_index"].ravel()]
        .reshape(16, 16, 2)
        .transpose(2, 0, 1)
    )
    output = attention(windows, mask=mask)
    for x, masked, actual in zip(windows.numpy(), mask.numpy(), output, strict=True):
        query, key, value = numpy_heads(weight, x, 2)
        attn = numpy_softmax(query @ key.transpose(0, 2, 1) / np.sqrt(6) + bias + masked)
        expected = numpy_output(weight, numpy_attn_scale(attn, weight["omega"]), value)  # L crosses the mask
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-11, atol=1e-11)


def test_released_cait_attention_against_numpy():
    attention = scaled_model("cait", ("attnscale", "released")).blocks[0].attn
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = numpy_weights(attention)
    query, key, value = numpy_heads(weight, x.numpy(), 3)

    def mixed(name, maps):
        return np.tensordot(weight[f"{name}.weight"], maps, axes=1) + weight[f"{name}.bias"][:, None, None]

    attn = mixed("proj_w", numpy_softmax(mixed("proj_l", query @ key.transpose(0, 2, 1) / np.sqrt(8))))
    assert np.abs(attn.sum(axis=-1) - 1).max() > 1e-2  # the maps that are scaled are no averages
    expected = numpy_output(weight, numpy_attn_scale(attn, weight["proj_w.omega"]), value)
    np.testing.assert_allclose(attention(x[None])[0].detach().numpy(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_float16_with_a_scaling_stays_close_to_float32(family, variant):
    model, images = scaled_model(family, variant).float().eval(), images_for(family).float()
    expected, expected_gradients = gradients(model, images)
    half = copy.deepcopy(model).half()
    half.zero_grad()
    output, actual = gradients(half, images.half())
    assert output.dtype == torch.float16 and output.isfinite().all()
    assert (output.float() - expected).abs().max() <= 0.01 * expected.abs().max()
    for name in scaling_parameters(model):
        error = (actual[name].float() - expected_gradients[name]).abs().max()
        assert error <= 0.05 * expected_gradients[name].abs().max(), name


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_untouched_model_does_not_move(family, variant, dtype):
    model, images = plain_model(family, drop_path_rate=0.3).to(dtype), images_for(family).to(dtype)
    before = {}
    for training in (False, True):
        torch.manual_seed(4)
        before[training] = model.train(training)(images)
    kind, form = variant
    apply_scaling(model, kind, form=form)
    for training in (False, True):
        torch.manual_seed(4)
        torch.testing.assert_close(model.train(training)(images), before[training], rtol=0, atol=1e-6)
    assert all(parameter.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_a_plain_checkpoint_lacks_the_new_parameters_only(family, variant):
    weights = plain_model(family).state_dict()
    model = scaled_model(family, variant)
    names = list(scaling_parameters(model))
    result = model.load_state_dict(weights, strict=False)
    assert result.missing_keys == names and result.unexpected_keys == []
    assert load_weights(model, weights) == names
    assert load_weights(copy.deepcopy(model), model.state_dict()) == []
    assert all(parameter.ndim == 1 for parameter in scaling_parameters(model).values())


def test_a_checkpoint_must_have_all_scaling_parameters_or_none():
    trained = scaled_model("vit", ("featscale", "released"))
    model = plain_model("vit", embed_dim=24)
    apply_scaling(model, "featscale")
    before = copy.deepcopy(model.state_dict())
    weights = trained.state_dict() | {"head.bias": torch.ones(5).double()}
    half = {name: value for name, value in weights.items() if not name.endswith(".t")}
    message = r"only 3 of the model's 6 scaling parameters \(all or none .*; first missing: blocks.0.attn.t\)"
    with pytest.raises(InputError, match=message):
        load_weights(model, half)
    with pytest.raises(InputError, match=r"6 not in the model, first blocks.0.attn.s"):
        load_weights(plain_model("vit"), weights)
    with pytest.raises(InputError, match=r"does not fit this VisionTransformer: 1 missing, first cls_token"):
        load_weights(model, {name: value for name, value in weights.items() if name != "cls_token"})
    with pytest.raises(InputError, match=r"1 of another shape, first head.bias"):
        load_weights(model, weights | {"head.bias": torch.ones(6)})
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert load_weights(model, weights) == []
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


@pytest.mark.parametrize("family", SCALED)
def test_the_released_doubling_is_twice_the_scales(family):
    variant, images = ("featscale", "released"), images_for(family)
    model = scaled_model(family, variant).eval()
    doubled = direct_model(model, variant, times=2)(images)
    with torch.no_grad():
        for parameter in scaling_parameters(model).values():
            parameter.mul_(2)
    torch.testing.assert_close(model(images), doubled, rtol=1e-9, atol=1e-9)


def test_feat_scale_commutes_with_layer_scale_and_drop_path():
    x, s, t, gamma = torch.randn(3, 5, 6).double(), *torch.randn(3, 6).double()
    kept = torch.tensor([2.0, 0.0, 2.0]).double()[:, None, None]
    torch.testing.assert_close(feat_scale(kept * gamma * x, s, t), kept * gamma * feat_scale(x, s, t))


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_drop_path_and_the_dropout_of_the_projection_keep_their_place(family, variant):
    model = scaled_model(family, variant, drop_path_rate=0.5, proj_drop_rate=0.2)
    images, outputs = images_for(family, count=8), []
    for each in (model, direct_model(model, variant), copy.deepcopy(model).eval()):
        torch.manual_seed(7)
        outputs.append(each(images))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(outputs[0], outputs[2], rtol=1e-3)


def test_forms_agree_without_mask_or_mixing_and_only_there():
    images = {family: images_for(family) for family in SCALED}
    outputs = {
        (family, form): scaled_model(family, ("attnscale", form)).eval()(images[family])
        for family, form in itertools.product(SCALED, ("released", "respecting"))
    }
    assert torch.equal(outputs["vit", "released"], outputs["vit", "respecting"])
    for family in ("swin", "cait"):
        assert (outputs[family, "released"] - outputs[family, "respecting"]).abs().max() > 1e-4
    # without a shift there is no mask to respect
    forms = ("released", "respecting")
    first = [scaled_model("swin", ("attnscale", form)).layers[0].blocks[0].eval() for form in forms]
    x = torch.randn(2, 10, 10, 12, dtype=torch.float64)
    torch.testing.assert_close(first[0](x), first[1](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["cait", "swin"])
def test_the_respecting_form_keeps_apart_what_the_map_keeps_apart(family):
    model = scaled_model(family, ("attnscale", "respecting")).eval()
    if family == "cait":  # mixed rows keep their sums: values that are alike stay what the plain map makes of them
        attention = model.blocks[0].attn
        x = torch.randn(1, 1, 24, dtype=torch.float64).expand(2, 17, 24)
        torch.testing.assert_close(attention(x), TalkingHeadAttn.forward(plain_model("cait").blocks[0].attn, x))
        return
    block = model.layers[0].blocks[1]  # windows of 4 × 4, shifted by 2, on 12 × 12 with padding
    x = torch.randn(1, 10, 10, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, :2, :2] += 1  # the corner shares its window with tokens that are not its neighbours
    moved = (block._attn(x) != block._attn(changed)).any(dim=-1)[0]
    assert torch.equal(moved.nonzero().amax(dim=0), torch.tensor([1, 1]))


@pytest.mark.parametrize(("family", "form"), itertools.product(("vit", "swin"), ("released", "respecting")))
def test_fused_and_unfused_attention_agree_in_float32(family, form):
    side = 224 if family == "vit" else 20  # 1025 tokens, or windows of 16
    model = scaled_model(family, ("attnscale", form), img_size=side).float().eval()
    entered = []
    for block in scaled_blocks(model):
        block.attn.register_forward_pre_hook(lambda *given: entered.append(given), with_kwargs=True)
    model(torch.randn(1, 1, side, side))
    for attention, inputs, options in entered[:]:
        mask = options.get("mask")
        expected = direct_attention(copy.deepcopy(attention).double(), form, inputs[0].double(), mask)
        # queries and keys; their products; over tokens, the sums of the softmax, the mean and the values; the
        # projection
        (n, d), heads = inputs[0].shape[-2:], attention.num_heads
        allowed = roundoff(torch.float32, d, d // heads, 3 * n, d) * expected.abs().max()
        for fused in (True, False):
            attention.fused_attn = fused
            error = attention(*inputs, **options) - expected
            assert error.abs().max() <= allowed


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_half_precision_and_autocast_stay_close(family, variant):
    model, images = scaled_model(family, variant).float().eval(), images_for(family).float()
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(images)
    for output in (autocast, copy.deepcopy(model).bfloat16()(images.bfloat16())):
        assert (output.float() - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_non_contiguous_tokens_and_a_single_token(family, variant):
    model = scaled_model(family, variant).eval()
    block = scaled_blocks(model)[0]
    shape = (3, 10, 10, 12) if family == "swin" else (3, 17, 24)
    x = torch.randn(shape, dtype=torch.float64).mT.contiguous().mT
    assert not x.is_contiguous()
    torch.testing.assert_close(block(x), block(x.contiguous()), rtol=1e-12, atol=1e-12)
    if variant[0] == "attnscale":  # one token: A = L, nothing to scale unless the mixed rows do not sum to 1
        token = torch.randn(2, 1, 24, dtype=torch.float64)
        if family != "swin":
            expected = direct_attention(block.attn, variant[1], token)
            torch.testing.assert_close(block.attn(token), expected, rtol=1e-12, atol=1e-12)
        if family == "vit":
            torch.testing.assert_close(block.attn(token), Attention.forward(plain_model("vit").blocks[0].attn, token))


def test_feat_scale_of_a_single_token_has_no_hc():
    x, s = torch.randn(2, 1, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for t in (torch.zeros(4).double(), torch.ones(4).double()):
        torch.testing.assert_close(feat_scale(x, s, t), (1 + s) * x)


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"scale_attn_norm": True}])
def test_norms_of_timms_attention(options):
    model = scaled_model("vit", ("attnscale", "released"), **options).eval()
    attention, images, tokens = model.blocks[0].attn, images_for("vit"), []
    attention.gate = torch.nn.Linear(24, 24).double()
    timm_model = copy.deepcopy(model)
    timm_model.blocks[0].attn.__class__ = Attention
    attn = attention_maps(timm_model, images)[0]
    attention.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
    model(images)
    value = attention.qkv(tokens[0])[..., 48:].unflatten(-1, (3, 8)).transpose(1, 2)
    merged = attention.norm((direct_attn_scale(attn, attention.omega) @ value).transpose(1, 2).flatten(2))
    expected = attention.proj(merged * attention.gate(tokens[0]).sigmoid())
    torch.testing.assert_close(attention(tokens[0]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("family", "form"), [(family, form) for family, (kind, form) in CASES if kind == "attnscale"])
def test_attention_dropout_keeps_the_mean(family, form, fused):
    block = scaled_blocks(scaled_model(family, ("attnscale", form)))[-1]
    attention, n, d = block.attn, 16, block.attn.proj.in_features
    attention.attn_drop.p, attention.fused_attn = 0.3, fused
    x = torch.randn(1, n, d, dtype=torch.float64).expand(3000, n, d)
    torch.manual_seed(8)
    with torch.no_grad():
        outputs, expected = attention.train()(x), attention.eval()(x[:1])[0]
    standard_errors = outputs.std(dim=0) / 3000**0.5
    assert ((outputs.mean(dim=0) - expected) / standard_errors).abs().max() < 5


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_probe_still_sees_the_softmax_and_the_branches(family, variant):
    model, images = scaled_model(family, variant, "no_ffn"), images_for(family)
    zero = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in scaling_parameters(zero).values():
            parameter.zero_()
    maps, plain = attention_maps(model, images), attention_maps(zero, images)
    assert torch.equal(maps[0], plain[0])  # the same softmax, whatever the scaling makes of it
    assert len(maps) == len(blocks(model))
    direct = branch_outputs(direct_model(model, variant), images)
    for trace, expected in zip(branch_outputs(model, images), direct, strict=True):
        torch.testing.assert_close(trace.sab, expected.sab, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_copies_are_independent_and_policies_may_change_later(family, variant):
    model, images = scaled_model(family, variant).eval(), images_for(family)
    before, copied = model(images), copy.deepcopy(model)
    remove_skips(model, "none")
    torch.testing.assert_close(model(images), scaled_model(family, variant, "none").eval()(images), rtol=0, atol=0)
    remove_skips(model, "both")
    assert torch.equal(model(images), before)
    with torch.no_grad():
        for parameter in scaling_parameters(model).values():
            parameter.add_(1)
    assert torch.equal(copied(images), before)
    assert not torch.allclose(model(images), before)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_compiles_into_one_graph_and_checkpoints_gradients(family, variant):
    model, images = scaled_model(family, variant, "no_sab").eval(), images_for(family)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-12, atol=1e-12)
    checkpointed = copy.deepcopy(model)
    checkpointed.set_grad_checkpointing()
    (_, expected), (_, actual) = gradients(model, images), gradients(checkpointed, images)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_no_weight_decay(family, variant):
    model = scaled_model(family, variant)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {decay[id(parameter)] for parameter in scaling_parameters(model).values()} == {0}
    assert 0.05 in decay.values()


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("deit_small_patch16_224", "attnscale", 12 * 6),
        ("deit_small_patch16_224", "featscale", 12 * 2 * 384),
        ("deit_small_distilled_patch16_224", "attnscale", 12 * 6),
        ("cait_s24_224", "attnscale", 24 * 8),
        ("cait_s24_224", "featscale", 24 * 2 * 384),
        ("swin_small_patch4_window7_224", "attnscale", 2 * 3 + 2 * 6 + 18 * 12 + 2 * 24),
        ("swin_small_patch4_window7_224", "featscale", 2 * 96 * (2 + 2 * 2 + 18 * 4 + 2 * 8)),
    ],
)
def test_parameter_counts_of_the_paper(name, kind, count):
    with torch.device("meta"):
        model = create_model(name, num_classes=1000)
    before = sum(parameter.numel() for parameter in model.parameters())
    apply_scaling(model, kind)
    assert sum(parameter.numel() for parameter in scaling_parameters(model).values()) == count
    assert sum(parameter.numel() for parameter in model.parameters()) - before == count


def test_refusals_are_one_line_and_change_nothing():
    for family in ("pvt_v2", "convmixer"):
        with pytest.raises(InputError, match=rf"does not exist for {family} \(supported: vit, swin, cait\)"):
            apply_scaling(create_model(family, num_classes=5, in_chans=1, **SMALL[family]), "attnscale")
    for arguments, message in (
        ({"kind": "attn_scale"}, "unknown scaling 'attn_scale'; did you mean 'attnscale'"),
        ({"kind": "attnscale", "form": "release"}, "unknown form 'release'; did you mean 'released'"),
        ({"kind": "featscale", "form": "respecting"}, r"featscale has no form 'respecting': .* \(allowed: released"),
    ):
        with pytest.raises(InputError, match=message):
            check_scaling(FAMILIES["swin"], **arguments)
    model = scaled_model("cait", ("featscale", "released"))
    with pytest.raises(InputError, match="this Cait has a scaling already"):
        apply_scaling(model, "attnscale")
    with pytest.raises(InputError, match="blocks.0.attn is a DiffAttention; attnscale supports timm's Attention only"):
        apply_scaling(plain_model("vit", attn_layer="diff", embed_dim=24), "attnscale")
    with pytest.raises(InputError, match="blocks.0.attn is a ClassAttn; .* supports timm's TalkingHeadAttn only"):
        apply_scaling(plain_model("cait", attn_block=ClassAttn), "attnscale")
    model = plain_model("vit")
    model.blocks[2].attn = torch.nn.Identity()
    with pytest.raises(InputError, match="blocks.2.attn is a Identity; attnscale supports timm's Attention only"):
        apply_scaling(model, "attnscale")
    assert type(model.blocks[0]) is Block and type(model.blocks[0].attn) is Attention and not scaling_parameters(model)


@pytest.mark.parametrize("kind", ["attnscale", "featscale"])
def test_a_mask_on_a_vit_is_refused(kind):
    model, images = scaled_model("vit", (kind, "released")), images_for("vit")
    for options in ({"is_causal": True}, {"attn_mask": torch.zeros(17, 17).double()}):
        with pytest.raises(InputError, match="average over all tokens, so attn_mask and is_causal are not supported"):
            model(images, **options)


def test_the_front_door_switches_scaling_on():
    arguments = {"num_classes": 3, "img_size": 28, "embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 7}
    torch.manual_seed(0)
    plain = create_model("vit", skip="no_ffn", **arguments).eval()
    torch.manual_seed(0)
    scaled = create_model("vit", skip="no_ffn", scaling="attnscale", **arguments).eval()
    images = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(scaled(images), plain(images), atol=1e-6, rtol=0)
    assert set(scaled.state_dict()) - set(plain.state_dict()) == {"blocks.0.attn.omega", "blocks.1.attn.omega"}
    with pytest.raises(InputError, match="featscale"):
        create_model("vit", scaling="fetscale", **arguments)
    with pytest.raises(InputError, match="convmixer"):
        create_model("convmixer_768_32", num_classes=3, scaling="attnscale")


def test_the_front_door_knows_both_forms():
    arguments = {"num_classes": 10, "img_size": 28, "embed_dim": 12, "depths": [2], "num_heads": [2], "patch_size": 2,
                 "window_size": 7, "scaling": "attnscale"}  # fmt: skip
    forms = {
        form: create_model("swin", scaling_form=form, **arguments).layers[0].blocks[1].attn
        for form in ("released", "respecting")
    }
    assert type(forms["released"]) is not type(forms["respecting"])
    assert type(create_model("swin", **arguments).layers[0].blocks[1].attn) is type(forms["released"])
