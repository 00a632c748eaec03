"""The front door to models: timm's models by name, or built small from timm's class, with a skip policy.

Names, arguments, weights and outputs are timm's (1.0.31); see `skiplab.models.residual` for the skip policy. Initial
weights are drawn from timm's distributions by `skiplab.draws`: a seed gives the same ones on every machine.
"""

import difflib
import inspect
from typing import Any

import timm
import torch
from torch import nn

from skiplab import draws
from skiplab.errors import InputError, indivisible, unknown
from skiplab.models.residual import FAMILIES, Family, check_skip, find_blocks, remove_skips
from skiplab.models.scaling import FORMS, apply_scaling, check_scaling
from skiplab.models.skipless import SkiplessInit, apply_init, check_init

SIZES = (
    "patch_size",
    "embed_dim",
    "embed_dims",
    "depth",
    "depths",
    "num_heads",
    "dim",
    "kernel_size",
    "window_size",
    "sr_ratios",
    "in_chans",
)


def create_model(
    name: str,
    *,
    num_classes: int,
    img_size: int | tuple[int, int] | None = None,
    skip: str = "both",
    scaling: str | None = None,
    scaling_form: str = "released",
    init: SkiplessInit | None = None,
    **timm_kwargs: Any,
) -> nn.Module:
    """Create a timm model, with `skip` saying which skips its blocks keep.

    Args:
        name: A timm model of the families vit (ViT and DeiT), swin, cait, pvt_v2 and convmixer, with or without a
            pretrained tag; or the family's name alone for timm's class with the given arguments, such as
            `create_model("convmixer", num_classes=10, dim=64, depth=6, kernel_size=5, patch_size=7, in_chans=1)`.
        num_classes: Number of classes; 0 leaves the head out.
        img_size: Image size in pixels, one number or (height, width); None for timm's own. PVT v2 and ConvMixer
            take any size that passes the check, so it is checked for them and not passed on.
        skip: "both" leaves the timm model untouched: same state_dict, same outputs. "no_sab", "no_ffn" and "none"
            let the output of that branch replace its input in every block. ConvMixer has "both" and "none" only.
        scaling: "attnscale" or "featscale" adds the learnt scaling of Anti-Oversmoothing, at first without effect, to
            ViT, CaiT and Swin; None adds nothing. See lib/skiplab/models/scaling.py.
        scaling_form: AttnScale on Swin and CaiT: "released" as in the paper's code, or "respecting" masks and row sums.
        init: a SkiplessInit draws the weights of a ViT's blocks as Cutting the Skip does; None leaves timm's. See
            lib/skiplab/models/skipless.py.
        timm_kwargs: Whatever else timm takes: `pretrained=True`, `drop_path_rate=0.1`, …

    Returns:
        The timm model, in train mode, mapping images (B, C, H, W) to logits (B, num_classes).

    Raises:
        InputError: For an unknown name, a model of another family, an unsupported skip, scaling or init, an image size
            that is not a multiple of the patch size or too small, other blocks, and arguments that timm refuses.
    """
    family = _family_named(name)
    check_skip(family, skip)
    _check_sizes(timm_kwargs)
    _check_heads(timm_kwargs)
    if scaling is not None:
        check_scaling(family, scaling, scaling_form)
    elif scaling_form not in FORMS:
        raise unknown("form", scaling_form, FORMS)
    if init is not None:
        check_init(family, name)
    arguments = {"num_classes": num_classes, **timm_kwargs}
    if img_size is not None:
        _check_image_size(family, name, arguments, img_size)
        if "img_size" in inspect.signature(family.model).parameters:
            arguments["img_size"] = img_size
        _check_logits(family, name, arguments, img_size)
    model = _build(family, name, arguments)
    if init is not None:
        apply_init(model, init)
    if skip != "both":
        remove_skips(model, skip)
    if scaling is not None:
        apply_scaling(model, scaling, form=scaling_form)
    return model


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List each (name, block) of a model in the order in which the blocks run.

    Raises InputError for a model of another family, and for blocks of another class than the supported ones.
    """
    return [(name, block) for name, block, _ in find_blocks(model)]


def _family_named(name: str) -> Family:
    names = {family.name: {family.name, *_timm_names(family.modules)} for family in FAMILIES.values()}
    for family in FAMILIES.values():
        if name in names[family.name]:
            return family
    supported = f"supported: timm's models of the families {', '.join(FAMILIES)}, or a family's name alone"
    if name in _timm_names():
        raise InputError(f"model {name!r} is of another family ({supported})")
    nearest = difflib.get_close_matches(str(name), set().union(*names.values()), n=1, cutoff=0)[0]
    raise InputError(f"unknown model {name!r}; did you mean {nearest!r}? ({supported})")


def _timm_names(modules: tuple[str, ...] = ()) -> set[str]:
    return {*timm.list_models(module=modules), *timm.list_models(module=modules, include_tags=True)}


def _build(family: Family, name: str, arguments: dict[str, Any]) -> nn.Module:
    given = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
    try:
        with draws.Portable():
            model = family.model(**arguments) if name == family.name else timm.create_model(name, **arguments)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise InputError(f"timm cannot build {name!r} from the arguments given ({given}): {reason}") from error
    if not isinstance(model, family.model):
        raise InputError(
            f"with the arguments given ({given}) timm builds a {type(model).__name__} for {name!r}, not a "
            f"{family.model.__name__}; leave out what asks for it, such as features_only and use_naflex"
        )
    return model


def _check_sizes(arguments: dict[str, Any]) -> None:
    """Raise InputError for a size or number that is not a positive whole number, or a list of such numbers."""
    for name in SIZES:
        value = arguments.get(name)
        numbers = value if isinstance(value, list | tuple) else [value]
        if value is not None and not all(type(number) is int and number > 0 for number in numbers):
            raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _check_heads(arguments: dict[str, Any]) -> None:
    """Raise InputError where the given widths cannot be shared out among the given heads, stage by stage."""
    widths, heads = arguments.get("embed_dims", arguments.get("embed_dim")), arguments.get("num_heads")
    if widths is None or heads is None:
        return
    heads = heads if isinstance(heads, list | tuple) else [heads]
    if isinstance(widths, int):  # Swin's width doubles with each stage
        widths = [widths * 2**stage for stage in range(len(heads))]
    for width, count in zip(widths, heads):
        if width % count:
            raise indivisible("embed_dim", width, "num_heads", count)


def _check_image_size(family: Family, name: str, arguments: dict[str, Any], img_size: int | tuple[int, int]) -> None:
    sides = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise InputError(f"img_size {img_size!r} must be one positive whole number of pixels, or (height, width)")
    patch_sizes = family.patch_size(_outline(family, name, arguments))
    for side, patch in zip(sides, patch_sizes, strict=True):
        if side < family.least_image_size:
            raise InputError(f"image size {side} is too small for {name}: it needs {family.least_image_size} pixels")
        if side % patch:
            raise indivisible("image size", side, f"{name}'s patch size", patch)


def _check_logits(family: Family, name: str, arguments: dict[str, Any], img_size: int | tuple[int, int]) -> None:
    """Raise InputError where an image does not give one number for each class, as without pooling."""
    height, width = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
    model = _outline(family, name, arguments).eval()
    dtype = next(model.parameters()).dtype
    logits = model(torch.zeros(1, arguments.get("in_chans", 3), height, width, dtype=dtype, device="meta"))
    expected = (1, arguments["num_classes"])
    if arguments["num_classes"] and tuple(logits.shape) != expected:
        raise InputError(
            f"with the arguments given {name!r} maps an image to logits of shape {tuple(logits.shape)}, "
            f"not {expected}; leave out what changes that, such as global_pool"
        )


def _outline(family: Family, name: str, arguments: dict[str, Any]) -> nn.Module:
    """Return the model without values: it takes no memory and draws no random number."""
    loading = ("pretrained", "checkpoint_path", "device")
    with torch.device("meta"):
        return _build(family, name, {key: value for key, value in arguments.items() if key not in loading})
