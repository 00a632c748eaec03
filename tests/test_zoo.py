"""The front door: timm's models bit for bit, small models from timm's classes, and one clear line for bad input."""

import inspect

import pytest
import timm
import torch

from skiplab import draws
from skiplab.errors import InputError
from skiplab.models import FAMILIES, blocks, create_model

torch.set_num_threads(1)

TIMM_MODELS = [
    ("vit_tiny_patch16_224", 32, {"patch_size": 4, "depth": 2}),
    ("vit_tiny_patch16_224.augreg_in21k", 32, {"depth": 2, "init_values": 0.5, "drop_path_rate": 0.1}),
    ("deit_tiny_distilled_patch16_224", 32, {"patch_size": 8, "depth": 2}),
    ("swin_tiny_patch4_window7_224", 56, {"embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6)}),
    ("cait_xxs24_224", 32, {"patch_size": 8, "depth": 2}),
    ("pvt_v2_b0", 32, {"depths": (1, 1, 1, 1)}),
    ("pvt_v2_b2_li", 32, {"depths": (1, 1, 1, 1)}),
    ("convmixer_768_32", 28, {}),
]
WITHOUT_IMG_SIZE = ("pvt_v2", "convmixer")


@pytest.mark.parametrize(("name", "side", "arguments"), TIMM_MODELS)
def test_is_the_timm_model(name, side, arguments):
    torch.manual_seed(0)
    size = {} if name.startswith(WITHOUT_IMG_SIZE) else {"img_size": side}
    with draws.Portable():  # timm's own draws differ between machines
        theirs = timm.create_model(name, num_classes=10, **size, **arguments)
    torch.manual_seed(0)
    ours = create_model(name, num_classes=10, img_size=side, **arguments)
    assert type(ours) is type(theirs)
    assert [type(module) for module in ours.modules()] == [type(module) for module in theirs.modules()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())
    images = torch.randn(2, 3, side, side)
    for train in (False, True):
        outputs = []
        for model in (ours, theirs):
            torch.manual_seed(1)
            outputs.append(model.train(train)(images))
        assert outputs[0].shape == (2, 10)
        assert torch.equal(*outputs)


@pytest.mark.parametrize(("name", "side", "arguments"), [case for case in TIMM_MODELS if case[0] != "convmixer_768_32"])
def test_timm_weights_load_without_skips(name, side, arguments):
    torch.manual_seed(0)
    theirs = create_model(name, num_classes=10, img_size=side, **arguments).eval()
    ours = create_model(name, num_classes=10, img_size=side, skip="none", **arguments).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, side, side)
    assert not torch.equal(ours(images), theirs(images))
    assert all(isinstance(ours.get_submodule(name), type(block)) for name, block in blocks(theirs))


SMALL_MODELS = [
    ("vit", (28, 14), {"embed_dim": 64, "depth": 6, "num_heads": 4, "patch_size": 7}),
    ("swin", 28, {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "patch_size": 2}),
    ("cait", 28, {"embed_dim": 64, "depth": 6, "num_heads": 4, "patch_size": 7}),
    ("pvt_v2", 32, {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}),
    ("convmixer", 28, {"dim": 64, "depth": 6, "kernel_size": 5, "patch_size": 7}),
]


@pytest.mark.parametrize(("family", "size", "arguments"), SMALL_MODELS)
def test_builds_small_models_from_the_class(family, size, arguments):
    model = create_model(family, num_classes=10, img_size=size, in_chans=1, **arguments)
    assert type(model) is FAMILIES[family].model
    height, width = size if isinstance(size, tuple) else (size, size)
    assert model(torch.randn(2, 1, height, width)).shape == (2, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("family", "size", "arguments"), SMALL_MODELS)
def test_builds_in_the_dtype_asked_for(family, size, arguments, dtype):
    model = create_model(family, num_classes=5, img_size=size, in_chans=1, dtype=dtype, **arguments).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    height, width = size if isinstance(size, tuple) else (size, size)
    assert model(torch.zeros(1, 1, height, width, dtype=dtype)).dtype == dtype


def test_timm_still_is_as_the_table_says():
    for family in FAMILIES.values():
        assert timm.list_models(module=family.modules)
        assert ("img_size" in inspect.signature(family.model).parameters) == (family.name not in WITHOUT_IMG_SIZE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vit_tiny_patch16_242"}, "unknown model 'vit_tiny_patch16_242'; did you mean 'vit_tiny_patch16_224'"),
        ({"name": "vit_tiny_patch16_224.augreg"}, "did you mean 'vit_tiny_patch16_224.augreg_in1k'|augreg_in21k"),
        ({"name": "convmixr"}, "did you mean 'convmixer'"),
        ({"name": None}, "unknown model None"),
        ({"name": "resnet50"}, "'resnet50' is of another family .*vit, swin, cait, pvt_v2, convmixer"),
        ({"name": "swinv2_tiny_window8_256"}, "another family"),
        ({"name": "vit_small_patch16_dinov3"}, "another family"),
        (
            {"name": "swin", "scaling": "attnscale", "scaling_form": "respectful"},
            "unknown form 'respectful'; did you mean 'respecting'",
        ),
        ({"name": "swin", "scaling": "featscale", "scaling_form": "respecting"}, "featscale has no form 'respecting'"),
        ({"name": "vit", "skip": "no_sba"}, "unknown skip 'no_sba'; did you mean 'no_sab'"),
        ({"name": "vit", "skip": False}, "unknown skip False .*allowed: both, no_ffn, no_sab, none"),
        ({"name": "convmixer_768_32", "skip": "no_sab"}, "'no_sab' does not exist for convmixer.*allowed: both, none"),
        ({"name": "convmixer_768_32", "skip": "no_ffn"}, "'no_ffn' does not exist for convmixer.*allowed: both, none"),
        ({"name": "convmixer_768_32", "depth": 3}, "cannot build 'convmixer_768_32' .*'depth'"),
        ({"name": "vit", "embed_dm": 3}, "cannot build 'vit' .*'embed_dm'"),
        (
            {"name": "vit", "embed_dim": 10, "num_heads": 3},
            "embed_dim 10 is not divisible by num_heads 3 .nearest: 9 or 12",
        ),
        ({"name": "swin", "embed_dim": 24, "num_heads": [2, 5]}, "embed_dim 48 is not divisible by num_heads 5"),
        ({"name": "vit", "embed_dim": 10, "num_heads": 0}, "num_heads is 0; it must be a whole number of at least 1"),
        ({"name": "vit", "patch_size": 0, "img_size": 28}, "patch_size is 0; it must be a whole number of at least 1"),
        ({"name": "vit", "embed_dim": "16", "img_size": 28}, "embed_dim is '16'; it must be a whole number"),
        ({"name": "vit_tiny_patch16_224", "num_heads": "2"}, "num_heads is '2'; it must be a whole number"),
        ({"name": "swin", "depths": [2, 0]}, r"depths is \[2, 0\]; it must be a whole number"),
        (
            {"name": "vit", "norm_layer": "layer_nrm", "img_size": 28},
            "cannot build 'vit' .*norm_layer='layer_nrm'.*: KeyError",
        ),
        ({"name": "vit", "init_values": "a"}, "cannot build 'vit' .*init_values='a'"),
        (
            {"name": "vit_tiny_patch16_224", "features_only": True, "img_size": 224},
            "builds a FeatureGetterNet .*not a VisionTransformer",
        ),
        ({"name": "vit_tiny_patch16_224", "use_naflex": True}, "builds a NaFlexVit for .*leave out .* use_naflex"),
        (
            {"name": "vit_tiny_patch16_224", "global_pool": "", "img_size": 224},
            r"logits of shape \(1, 197, 10\), not \(1, 10\)",
        ),
        ({"name": "vit", "scaling_form": "bogus"}, "unknown form 'bogus'"),
        ({"name": "vit_small_patch16_18x2_224", "depth": 1, "skip": "none"}, "is a ParallelThingsBlock; only timm's"),
        (
            {"name": "vit_tiny_patch16_224", "img_size": 30},
            r"image size 30 is not .*\'s patch size 16 \(nearest: 16 or 32\)",
        ),
        ({"name": "vit_tiny_patch16_224", "img_size": (32, 40), "patch_size": 12}, "32 is not .* 12 .*: 24 or 36"),
        ({"name": "swin_tiny_patch4_window7_224", "img_size": 2}, "2 is not .* 4 .*: 4"),
        ({"name": "cait_xxs24_224", "img_size": 33}, "33 is not .* 16 .*: 32 or 48"),
        ({"name": "convmixer_768_32", "img_size": 32}, "32 is not .* 7 .*: 28 or 35"),
        ({"name": "pvt_v2_b0", "img_size": 28}, "28 is too small for pvt_v2_b0: it needs 32"),
        ({"name": "vit_tiny_patch16_224", "img_size": "32"}, "img_size '32' must be"),
        ({"name": "vit_tiny_patch16_224", "img_size": 0}, "img_size 0 must be"),
        ({"name": "vit_tiny_patch16_224", "img_size": (32, 32, 3)}, "must be one positive whole number"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        create_model(**{"num_classes": 10, **arguments})
    assert "\n" not in str(caught.value)
