"""The probe: right values, whatever the skip policy, and a model left exactly as it was."""

import pytest
import torch
import torch.nn.functional as F

from skiplab.errors import InputError
from skiplab.models import FAMILIES, attention_maps, blocks, branch_outputs, create_model, embeddings

torch.set_num_threads(1)

SMALL = {
    "vit": {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3, "init_values": 0.5},
    "swin": {"img_size": 20, "patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4},
    "cait": {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 2, "num_heads": 3, "init_values": 0.5},
    "pvt_v2": {"depths": (2, 1), "embed_dims": (8, 12), "num_heads": (1, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)},
    "convmixer": {"dim": 12, "depth": 3, "kernel_size": 5, "patch_size": 7},
}
SIDE = {"vit": 28, "swin": 20, "cait": 28, "pvt_v2": 32, "convmixer": 28}
CASES = [(family.name, skip) for family in FAMILIES.values() for skip in family.skips]
WITH_ATTENTION = [family for family in FAMILIES if family != "convmixer"]


def small_model(family, skip="both"):
    torch.manual_seed(0)
    model = create_model(family, num_classes=5, in_chans=1, skip=skip, **SMALL[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images_for(family):
    return torch.randn(2, 1, SIDE[family], SIDE[family], generator=torch.Generator().manual_seed(1))


def tokens_of(family, x):
    """Flatten what a block returns into (B, n, d)."""
    return x.flatten(1, 2) if family == "swin" else x.flatten(2).mT if family == "convmixer" else x


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_branch_outputs_add_up_to_what_the_block_returns(family, skip):
    model, images = small_model(family, skip).eval(), images_for(family)
    returned = []
    hooks = [block.register_forward_hook(lambda _, __, output: returned.append(output)) for _, block in blocks(model)]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()

    traces = branch_outputs(model, images)
    assert [trace.name for trace in traces] == [name for name, _ in blocks(model)]
    for trace, output in zip(traces, returned, strict=True):
        assert trace.tokens.ndim == 3 and trace.sab.shape == trace.tokens.shape
        assert torch.equal(trace.sab_with_input, trace.tokens + trace.sab)
        if family == "convmixer":
            assert trace.ffn is None and trace.ffn_with_input is None
            computed = trace.sab_with_input if skip == "both" else trace.sab
        else:
            between = trace.sab_with_input if skip in ("both", "no_ffn") else trace.sab
            assert torch.equal(trace.ffn_with_input, between + trace.ffn)
            computed = trace.ffn_with_input if skip in ("both", "no_sab") else trace.ffn
        assert torch.equal(computed, tokens_of(family, output))


def test_branch_outputs_are_those_of_timm_s_modules():
    model, images = small_model("vit").eval(), images_for("vit")
    block = model.blocks[1]
    trace = branch_outputs(model, images)[1]
    with torch.no_grad():
        assert torch.equal(trace.sab, block.ls1(block.attn(block.norm1(trace.tokens))))
        assert torch.equal(trace.ffn, block.ls2(block.mlp(block.norm2(trace.sab_with_input))))
    assert trace.kind == "attention"
    kinds = [trace.kind for trace in branch_outputs(small_model("cait"), images)]
    assert kinds == ["attention", "attention", "class attention", "class attention"]
    assert branch_outputs(small_model("convmixer"), images)[0].kind == "depth-wise convolution"


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_enter_the_first_block(family):
    model, images = small_model(family).eval(), images_for(family)
    with torch.no_grad():
        expected = {
            "vit": lambda: model._pos_embed(model.patch_embed(images)),
            "swin": lambda: model.patch_embed(images).flatten(1, 2),
            "cait": lambda: model.patch_embed(images) + model.pos_embed,
            "pvt_v2": lambda: model.patch_embed(images).flatten(1, 2),
            "convmixer": lambda: model.stem(images).flatten(2).mT,
        }[family]()
    assert torch.equal(embeddings(model, images), expected)


@pytest.mark.parametrize("skip", ["both", "none"])
@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_attention_maps_have_the_documented_shape_and_rows_that_sum_to_one(family, skip):
    shapes = {
        "vit": [(2, 3, 17, 17)] * 3,
        "swin": [(2 * 9, 2, 16, 16)] * 2 + [(2 * 4, 3, 16, 16)] * 2,
        "cait": [(2, 3, 16, 16)] * 2 + [(2, 3, 1, 17)] * 2,
        "pvt_v2": [(2, 1, 64, 16)] * 2 + [(2, 2, 16, 16)],
    }
    maps = attention_maps(small_model(family, skip), images_for(family))
    assert [tuple(attn.shape) for attn in maps] == shapes[family]
    for attn in maps:
        assert attn.min() >= 0
        torch.testing.assert_close(attn.sum(dim=-1), torch.ones(attn.shape[:-1]), rtol=0, atol=1e-5)
    assert maps[0].std(dim=-1).max() > 1e-3  # no uniform placeholder


@pytest.mark.parametrize("family", ["vit", "pvt_v2"])
def test_attention_maps_are_those_that_mix_the_values(family):
    model, images = small_model(family).eval(), images_for(family)
    block = blocks(model)[0][1]
    attn, trace = attention_maps(model, images)[0], branch_outputs(model, images)[0]
    with torch.no_grad():
        x = block.norm1(trace.tokens)
        if family == "vit":
            value = block.attn.qkv(x).chunk(3, dim=-1)[2]
        else:
            reduced = block.attn.norm(block.attn.sr(x.mT.reshape(2, 8, 8, 8)).flatten(2).mT)
            value = block.attn.kv(reduced).chunk(2, dim=-1)[1]
        value = value.unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2)
        mixed = block.attn.proj((attn @ value).transpose(1, 2).flatten(2))
        mixed = block.ls1(mixed) if family == "vit" else mixed
    torch.testing.assert_close(mixed, trace.sab, rtol=1e-5, atol=1e-5)


def test_talking_heads_are_captured_before_they_are_mixed():
    model, images = small_model("cait").eval(), images_for("cait")
    attention = model.blocks[0].attn
    with torch.no_grad():
        query, key, _ = (
            part.unflatten(-1, (3, 8)).transpose(1, 2)
            for part in attention.qkv(model.blocks[0].norm1(embeddings(model, images))).chunk(3, dim=-1)
        )
        expected = F.conv2d(query @ key.mT / 8**0.5, attention.proj_l.weight[:, :, None, None], attention.proj_l.bias)
    torch.testing.assert_close(attention_maps(model, images)[0], expected.softmax(dim=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("probe", [branch_outputs, attention_maps, embeddings])
@pytest.mark.parametrize("family", WITH_ATTENTION)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(family, probe, fails):
    model, images = small_model(family), images_for(family)
    blocks(model)[1][1].mlp.eval()
    blocks(model)[0][1].attn.fused_attn = False

    def state():
        random = torch.get_rng_state()
        return random, [
            (name, type(module), module.training, getattr(module, "fused_attn", None), list(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ]

    def fail(module, inputs):
        raise RuntimeError("stop")

    weights = {key: value.clone() for key, value in model.state_dict().items()}
    broken = blocks(model)[-1][1].mlp.register_forward_pre_hook(fail) if fails else None
    random, before = state()
    if fails and probe is not embeddings:
        with pytest.raises(RuntimeError, match="stop"):
            probe(model, images)
    elif not fails:
        probe(model, images)
    random_after, after = state()
    assert before == after and torch.equal(random, random_after)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    assert torch.is_grad_enabled() and all(parameter.grad is None for parameter in model.parameters())
    if broken:
        broken.remove()


def test_batch_statistics_do_not_move():
    model = small_model("convmixer")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    branch_outputs(model, images_for("convmixer"))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(module.training for module in model.modules())


def test_bad_input_is_one_clear_line():
    model, images = small_model("vit"), images_for("vit")
    for probe in (branch_outputs, attention_maps, embeddings):
        with pytest.raises(InputError, match=r"B ≥ 1, got shape \(0, 1, 28, 28\)"):
            probe(model, images[:0])
        with pytest.raises(InputError, match=r"got shape \(1, 28, 28\)"):
            probe(model, images[0])
        with pytest.raises(InputError, match="Linear is no model of a supported family"):
            probe(torch.nn.Linear(2, 2), images)
    with pytest.raises(InputError, match="ConvMixer has no attention maps"):
        attention_maps(small_model("convmixer"), images)


def test_wrong_attention_maps_are_refused():
    images = images_for("vit")

    model = small_model("vit")
    model.blocks[1].attn.attn_drop = torch.nn.Identity()
    model.blocks[1].attn.forward = lambda x, **options: x
    with pytest.raises(InputError, match="block blocks.1 gave no attention map"):
        attention_maps(model, images)

    model = small_model("vit")
    model.blocks[1].attn.forward = lambda x, **options: model.blocks[1].attn.attn_drop(x[:, None])[:, 0]
    with pytest.raises(InputError, match=r"block blocks.1 has shape \(2, 1, 17, 24\), expected \(2, 3, 17, 17\)"):
        attention_maps(model, images)

    model = small_model("vit")
    attn = torch.full((2, 3, 17, 17), 1 / 17)
    attn[0, 0, 0, 0] += 1e-4
    model.blocks[1].attn.forward = lambda x, **options: (model.blocks[1].attn.attn_drop(attn), x)[1]
    with pytest.raises(InputError, match="rows of block blocks.1's attention map do not sum to 1: off by 0.0001"):
        attention_maps(model, images)
    attn[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="do not sum to 1: off by nan"):
        attention_maps(model, images)


def test_a_model_compiled_in_place_is_refused_rather_than_probed_empty():
    model, images = small_model("vit"), images_for("vit")
    model._compiled_call_impl = lambda images: None  # what nn.Module.compile sets: a call that reaches no hook
    for probe in (branch_outputs, attention_maps, embeddings):
        with pytest.raises(InputError, match="give (it|the probe) the model uncompiled"):
            probe(model, images)
