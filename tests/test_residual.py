"""The skip policy against two-branch references of each family, written here from the models' weights alone."""

import concurrent.futures
import copy
import math
import multiprocessing
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models.vision_transformer import Block

from skiplab.errors import InputError
from skiplab.models import FAMILIES, SKIPS, blocks, create_model, remove_skips

torch.set_num_threads(1)

SMALL = {
    "vit": {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 3, "num_heads": 3, "init_values": 0.5},
    # 10 × 10 tokens, then 5 × 5, in windows of 4: padded, and shifted in every second block
    "swin": {"img_size": 20, "patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4},
    "cait": {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 2, "num_heads": 3, "init_values": 0.5},
    "pvt_v2": {"depths": (2, 1), "embed_dims": (8, 12), "num_heads": (1, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)},
    "convmixer": {"dim": 12, "depth": 3, "kernel_size": 5, "patch_size": 7},
}
SIDE = {"vit": 28, "swin": 20, "cait": 28, "pvt_v2": 32, "convmixer": 28}
CASES = [(family.name, skip) for family in FAMILIES.values() for skip in family.skips]


def small_model(family, skip="both", **more):
    """Build a float64 model in which no parameter or statistic has the value it is initialised with."""
    torch.manual_seed(0)
    model = create_model(family, num_classes=5, in_chans=1, skip=skip, **SMALL[family], **more).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))
    return model


def images_for(family, count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, SIDE[family], SIDE[family], dtype=torch.float64, generator=generator)


def norm(module, x):
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def dropped(module, branch):
    """Stochastic depth: a sample's branch is zero with the module's probability, and scaled up otherwise."""
    if not isinstance(module, DropPath) or not module.training:
        return branch
    keep = 1 - module.drop_prob
    return branch * torch.empty(len(branch), *[1] * (branch.ndim - 1), dtype=branch.dtype).bernoulli_(keep) / keep


def linear(module, x):
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def mlp(module, x):
    return linear(module.fc2, F.gelu(linear(module.fc1, x)))


def split_heads(x, heads):
    batch, n, d = x.shape
    return x.reshape(batch, n, heads, d // heads).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).flatten(2)


def attend(query, key, value, bias=0.0):
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    return (logits + bias).softmax(dim=-1) @ value


def two_branches(x, sab, ffn, skip):
    x = sab(x) + (x if skip in ("both", "no_ffn") else 0)
    return ffn(x) + (x if skip in ("both", "no_sab") else 0)


def vit_reference(model, images, skip, bias=0.0):
    x = F.conv2d(images, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=7).flatten(2).mT
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.pos_embed
    for block in model.blocks:

        def sab(x, block=block):
            parts = linear(block.attn.qkv, norm(block.norm1, x)).chunk(3, dim=-1)
            query, key, value = (split_heads(part, 3) for part in parts)
            out = linear(block.attn.proj, merge_heads(attend(query, key, value, bias)))
            return dropped(block.drop_path1, block.ls1.gamma * out)

        def ffn(x, block=block):
            return dropped(block.drop_path2, block.ls2.gamma * mlp(block.mlp, norm(block.norm2, x)))

        x = two_branches(x, sab, ffn, skip)
    return linear(model.head, norm(model.norm, x)[:, 0])


def window_attention(attention, x, shift, window):
    """Shifted-window attention of one feature map (B, H, W, d), one window after the other."""
    batch, height, width, d = x.shape
    x = x.roll((-shift, -shift), dims=(1, 2))
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    padded_height, padded_width = x.shape[1:3]

    def region(position, length):
        return 0 if position < length - window else 1 if position < length - shift else 2

    places = [(row, column) for row in range(window) for column in range(window)]
    table = attention.relative_position_bias_table.reshape(2 * window - 1, 2 * window - 1, -1)
    relative = torch.stack(
        [torch.stack([table[a[0] - b[0] + window - 1, a[1] - b[1] + window - 1] for b in places]) for a in places]
    ).permute(2, 0, 1)
    out = torch.zeros_like(x)
    for top in range(0, padded_height, window):
        for left in range(0, padded_width, window):
            tile = x[:, top : top + window, left : left + window].reshape(batch, -1, d)
            parts = linear(attention.qkv, tile).chunk(3, dim=-1)
            query, key, value = (split_heads(part, attention.num_heads) for part in parts)
            labels = [(region(top + row, padded_height), region(left + column, padded_width)) for row, column in places]
            apart = torch.tensor([[-100.0 if a != b and shift else 0.0 for b in labels] for a in labels]).double()
            mixed = linear(attention.proj, merge_heads(attend(query, key, value, relative + apart)))
            out[:, top : top + window, left : left + window] = mixed.reshape(batch, window, window, d)
    return out[:, :height, :width].roll((shift, shift), dims=(1, 2))


def swin_reference(model, images, skip):
    x = F.conv2d(images, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=2).permute(0, 2, 3, 1)
    x = norm(model.patch_embed.norm, x)
    for stage, layer in enumerate(model.layers):
        if stage > 0:
            x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
            x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], dim=-1)
            x = linear(layer.downsample.reduction, norm(layer.downsample.norm, x))
        for index, block in enumerate(layer.blocks):

            def sab(x, block=block, index=index):
                mixed = window_attention(block.attn, norm(block.norm1, x), shift=2 * (index % 2), window=4)
                return dropped(block.drop_path1, mixed)

            def ffn(x, block=block):
                return dropped(block.drop_path2, mlp(block.mlp, norm(block.norm2, x)))

            x = two_branches(x, sab, ffn, skip)
    return linear(model.head.fc, norm(model.norm, x).mean(dim=(1, 2)))


def mix_heads(module, attn):
    return torch.einsum("gh,bhij->bgij", module.weight, attn) + module.bias[:, None, None]


def cait_reference(model, images, skip):
    x = F.conv2d(images, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=7).flatten(2).mT
    x = x + model.pos_embed
    for block in model.blocks:

        def sab(x, block=block):
            attention = block.attn
            parts = linear(attention.qkv, norm(block.norm1, x)).chunk(3, dim=-1)
            query, key, value = (split_heads(part, 3) for part in parts)
            logits = query @ key.mT / math.sqrt(8)
            attn = mix_heads(attention.proj_w, mix_heads(attention.proj_l, logits).softmax(dim=-1))
            return dropped(block.drop_path, block.gamma_1 * linear(attention.proj, merge_heads(attn @ value)))

        def ffn(x, block=block):
            return dropped(block.drop_path, block.gamma_2 * mlp(block.mlp, norm(block.norm2, x)))

        x = two_branches(x, sab, ffn, skip)
    class_token = model.cls_token.expand(len(x), -1, -1)
    for block in model.blocks_token_only:

        def class_sab(class_token, block=block):
            every = norm(block.norm1, torch.cat([class_token, x], dim=1))
            query = split_heads(linear(block.attn.q, every[:, :1]), 3)
            key, value = (split_heads(linear(part, every), 3) for part in (block.attn.k, block.attn.v))
            return block.gamma_1 * linear(block.attn.proj, merge_heads(attend(query, key, value)))

        def class_ffn(class_token, block=block):
            return block.gamma_2 * mlp(block.mlp, norm(block.norm2, class_token))

        class_token = two_branches(class_token, class_sab, class_ffn, skip)
    return linear(model.head, norm(model.norm, class_token)[:, 0])


def pvt_v2_reference(model, images, skip):
    x = images
    for stage, embed in zip(model.stages, (model.patch_embed, model.stages[1].downsample), strict=True):
        stride, padding = (4, 3) if embed is model.patch_embed else (2, 1)
        x = F.conv2d(x, embed.proj.weight, embed.proj.bias, stride=stride, padding=padding)
        height, width = x.shape[2:]
        x = norm(embed.norm, x.flatten(2).mT)
        for block in stage.blocks:

            def as_map(x, height=height, width=width):
                return x.mT.reshape(len(x), -1, height, width)

            def sab(x, block=block, as_map=as_map):
                attention, x = block.attn, norm(block.norm1, x)
                reduced = x
                if attention.sr is not None:
                    reduced = F.conv2d(as_map(x), attention.sr.weight, attention.sr.bias, stride=2).flatten(2).mT
                    reduced = norm(attention.norm, reduced)
                parts = linear(attention.kv, reduced).chunk(2, dim=-1)
                key, value = (split_heads(part, attention.num_heads) for part in parts)
                query = split_heads(linear(attention.q, x), attention.num_heads)
                return dropped(block.drop_path1, linear(attention.proj, merge_heads(attend(query, key, value))))

            def ffn(x, block=block, as_map=as_map):
                hidden = as_map(linear(block.mlp.fc1, norm(block.norm2, x)))
                convolution = block.mlp.dwconv
                hidden = F.conv2d(hidden, convolution.weight, convolution.bias, padding=1, groups=hidden.shape[1])
                return dropped(block.drop_path2, linear(block.mlp.fc2, F.gelu(hidden.flatten(2).mT)))

            x = two_branches(x, sab, ffn, skip)
        x = norm(stage.norm, x).mT.reshape(len(x), -1, height, width)
    return linear(model.head, x.mean(dim=(2, 3)))


def convmixer_reference(model, images, skip):
    def batch_norm(module, x):
        scale = module.weight / (module.running_var + module.eps).sqrt()
        return (x - module.running_mean[:, None, None]) * scale[:, None, None] + module.bias[:, None, None]

    x = batch_norm(model.stem[2], F.gelu(F.conv2d(images, model.stem[0].weight, model.stem[0].bias, stride=7)))
    for residual, pointwise, _, pointwise_norm in model.blocks:
        depthwise, _, depthwise_norm = residual.fn
        mixed = F.conv2d(x, depthwise.weight, depthwise.bias, padding=2, groups=x.shape[1])
        x = batch_norm(depthwise_norm, F.gelu(mixed)) + (x if skip == "both" else 0)
        x = batch_norm(pointwise_norm, F.gelu(F.conv2d(x, pointwise.weight, pointwise.bias)))
    return linear(model.head, x.mean(dim=(2, 3)))


REFERENCES = {
    "vit": vit_reference,
    "swin": swin_reference,
    "cait": cait_reference,
    "pvt_v2": pvt_v2_reference,
    "convmixer": convmixer_reference,
}


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_agrees_with_a_reference_of_two_branches(family, skip):
    model, images = small_model(family, skip).eval(), images_for(family)
    expected = REFERENCES[family](model, images, skip)
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)
    other = REFERENCES[family](model, images, "none" if skip == "both" else "both")
    assert (other - expected).abs().max() > 1e-3  # the reference can tell policies apart


@pytest.mark.parametrize(("family", "skip"), [case for case in CASES if case[0] != "convmixer"])
def test_drop_path_keeps_its_place(family, skip):
    model, images = small_model(family, skip, drop_path_rate=0.5), images_for(family, count=8)
    torch.manual_seed(2)
    actual = model(images)
    torch.manual_seed(2)
    torch.testing.assert_close(actual, REFERENCES[family](model, images, skip), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(actual, model.eval()(images), rtol=1e-3)  # something was dropped


@pytest.mark.parametrize("skip", SKIPS)
def test_vit_masks_pass_through(skip):
    model, images = small_model("vit", skip).eval(), images_for("vit")
    causal = torch.full((17, 17), -torch.inf, dtype=torch.float64).triu(1)
    expected = vit_reference(model, images, skip, bias=causal.T)
    torch.testing.assert_close(model(images, attn_mask=causal.T), expected, rtol=1e-9, atol=1e-9)
    expected = vit_reference(model, images, skip, bias=causal)
    torch.testing.assert_close(model(images, is_causal=True), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_a_copy_is_independent(family, skip):
    model, images = small_model(family, skip).eval(), images_for(family)
    copied = copy.deepcopy(model)
    before = model(images)
    remove_skips(model, "both" if skip == "none" else "none")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(copied(images), before)
    assert not torch.allclose(model(images), before)


def logits(model, images):
    return model(images)


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_a_model_goes_through_a_file_and_to_another_process(tmp_path, family, skip):
    model, images = small_model(family, skip).eval(), images_for(family)
    torch.save(model, tmp_path / "model.pt")
    for copied in (torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(images), model(images))
        remove_skips(copied, "both")
        assert [type(block) for _, block in blocks(copied)] == [type(block) for _, block in blocks(small_model(family))]


def test_a_model_without_skips_computes_in_a_spawned_process():
    model, images = small_model("vit", "none").eval().requires_grad_(False), images_for("vit")
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        torch.testing.assert_close(pool.submit(logits, model, images).result(), model(images))


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_policies_can_be_changed_and_leave_weights_alone(family, skip):
    model, images = small_model(family).eval(), images_for(family)
    before, weights = model(images), copy.deepcopy(model.state_dict())
    remove_skips(model, skip)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    assert torch.equal(model(images), before) == (skip == "both")
    remove_skips(model, "both")
    assert [type(block) for _, block in blocks(model)] == [type(block) for _, block in blocks(small_model(family))]
    assert torch.equal(model(images), before)


@pytest.mark.parametrize(("family", "skip"), CASES)
def test_gradients_reach_every_parameter_also_with_checkpointing(family, skip):
    gradients = []
    for checkpointing in (False, True):
        model, images = small_model(family, skip).eval(), images_for(family)
        model.set_grad_checkpointing(checkpointing)
        model(images).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.any() or name.endswith("attn.k.bias"), name  # the softmax cancels a bias of the keys
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_into_one_graph(family):
    model, images = small_model(family, "none").eval(), images_for(family)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-12, atol=1e-12)


def test_blocks_are_listed_in_order():
    assert [name for name, _ in blocks(small_model("cait", "none"))] == [
        "blocks.0",
        "blocks.1",
        "blocks_token_only.0",
        "blocks_token_only.1",
    ]
    assert [name for name, _ in blocks(small_model("pvt_v2"))] == [
        "stages.0.blocks.0",
        "stages.0.blocks.1",
        "stages.1.blocks.0",
    ]
    assert len(blocks(small_model("swin"))) == 4
    assert [name for name, _ in blocks(small_model("convmixer"))] == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]


def test_refuses_what_has_no_table_entry():
    class MyBlock(Block):
        pass

    with pytest.raises(InputError, match=r"blocks.0 is a MyBlock; only timm's vision_transformer.Block is supported"):
        small_model("vit", "no_sab", block_fn=MyBlock)
    assert isinstance(small_model("vit", block_fn=MyBlock).blocks[0], MyBlock)  # nothing to remove, nothing to refuse
    with pytest.raises(InputError, match="Linear is no model of a supported family .*VisionTransformer"):
        remove_skips(torch.nn.Linear(2, 2), "none")
    model = small_model("vit")
    model.blocks[2] = torch.nn.Identity()
    with pytest.raises(InputError, match="blocks.2 is a Identity"):
        remove_skips(model, "none")
    assert type(model.blocks[0]) is Block  # refused as a whole: no block is changed
