"""Every function of the library on one device against the CPU: the first part of the GPU check."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.graying import dct_dense, photographs, svd_torch
from skiplab.models import create_model, probe
from skiplab.models.residual import FAMILIES
from skiplab.models.scaling import SCALINGS, scaling_parameters
from skiplab.models.skipless import SkiplessInit
from skiplab.theory import bounds, conditioning, jacobian, spectral
from skiplab.training import dense
from skiplab.transforms import augment, graying, multicrop

EPSILON = 0.5
SMALL = {  # a model of each family for 32 px images
    "vit": {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3},
    "swin": {"patch_size": 2, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (3, 3)},  # two shift
    "cait": {"patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3},
    "pvt_v2": {"embed_dims": (16, 32, 48, 48), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 3)},
    "convmixer": {"dim": 48, "depth": 3, "kernel_size": 5, "patch_size": 4},
}
GRAYINGS = {"torch.linalg.svd": svd_torch, "svd": graying.gray_svd, "svd_fast": graying.gray_svd_fast,
            "dct": graying.gray_dct, "dct, dense": dct_dense}  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    """Draw a Gaussian tensor, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def parity_cases() -> dict[str, tuple[Callable, tuple, float]]:
    """Return {name: (function, its tensors on the CPU, the largest relative difference allowed)}.

    Allowed are some hundred roundings: about 1e-10 where the tensors are float64 and 1e-4 where float32, more where an
    iteration, an eigenvector or a whole model and its gradients amplify them. What draws on the CPU does so every time.
    """
    cases = (_spectral_cases, _conditioning_cases, _bound_cases, _transform_cases, _model_cases)
    return {name: case for part in cases for name, case in part().items()}


def _spectral_cases() -> dict[str, tuple[Callable, tuple, float]]:
    x, first = draw(2, 65, 32).double(), draw(3, 65, 32).double()[1:]
    attn = draw(2, 3, 65, 65).double().softmax(dim=-1)
    return {
        name: (getattr(spectral, name), tensors, 1e-10)
        for name, tensors in {
            "dc": (x,),
            "hc": (x,),
            "hc_ratio": (x,),
            "log_hc_intensity": (x, first),
            "signal_spectrum": (x,),
            "frequency_response": (attn,),
            "token_similarity": (x,),
            "attention_similarity": (attn,),
            "low_pass_share": (spectral.frequency_response(attn),),
        }.items()
    }


def _conditioning_cases() -> dict[str, tuple[Callable, tuple, float]]:
    x, layer = draw(2, 65, 32).double(), [draw(5, 12).double(), *(draw(4, 12, 12).double() / 3)]
    return {
        "singular_values": (conditioning.singular_values, (x,), 1e-10),
        "condition_number": (conditioning.condition_number, (x,), 1e-8),
        "attention": (jacobian.attention, (*layer, 3), 1e-10),
        "attention_jacobian": (jacobian.attention_jacobian, (*layer, 3), 1e-10),
        "autograd_jacobian": (_of_layer(jacobian.autograd_jacobian), tuple(layer), 1e-10),
        "jacobian_kappa": (
            lambda *layer: jacobian.jacobian_kappa(jacobian.attention_jacobian(*layer)),
            tuple(layer),
            1e-6,
        ),
        "jacobian_extremes": (
            _of_layer(lambda f, x: _ends(jacobian.jacobian_extremes(f, x, tolerance=1e-9))),
            tuple(layer),
            1e-6,
        ),
    }


def _bound_cases() -> dict[str, tuple[Callable, tuple, float]]:
    tokens, logits = draw(12, 8).double(), draw(3, 12, 12).double()
    w_q, w_k, w_v, m = draw(4, 8, 8).double() / 3
    maps = logits.softmax(dim=-1)
    cases = {
        "logits, all kinds": (
            lambda *given: [bounds.attention_logits(kind, *given) for kind in bounds.LOGITS],
            (tokens, w_q, w_k),
            1e-10,
        ),
        "attention_gain": (
            lambda p: [bounds.attention_gain(p, form) for form in ("paper", "range", "sharp")],
            (logits,),
            1e-10,
        ),
        "stationary_distribution": (bounds.stationary_distribution, (maps[0],), 1e-10),
    }
    checks = {
        "cubic_condition": (tokens, w_q, w_k, w_v),
        "ffn_condition": (tokens, w_q, w_k),
        "skip_condition": (tokens, m / 9),
        "low_pass_limit": (maps[0], tokens),
        "low_pass_rate": (maps[0], tokens, 3),
        "product_low_pass": (maps,),
        "attention_rate": (tokens, logits[0], w_v),
        "multihead_rate": (tokens, logits[:2], w_v, m),
        "residual_rate": (tokens, tokens @ m, 2.0),
        "ffn_rate": (tokens, w_q, w_k, m[0]),
        "layer_norm_rate": (tokens, m[0]),
        "diffuse_rows": (logits[0] / 99,),
        "diagonal_rows": (99 * torch.eye(12).double(),),
        "dominant_term": (w_q, m / 99),
    }
    return cases | {
        name: (lambda *given, check=getattr(bounds, name): _sides(check(*given)), given, 1e-8)
        for name, given in checks.items()
    }


def _of_layer(function: Callable) -> Callable:
    return lambda x, *weights: function(lambda tokens: jacobian.attention(tokens, *weights), x)


def _ends(found: jacobian.JacobianExtremes) -> tuple[float, float]:
    return found.sigma_max, found.sigma_min


def _sides(check: bounds.BoundCheck) -> tuple[float, float]:
    return check.measured, check.bound


def _transform_cases() -> dict[str, tuple[Callable, tuple, float]]:
    pictures, tokens = photographs(4, 64), graying.patchify(photographs(4, 224), 16)
    shifts = augment.draw_crop_flip(4, padding=4, generator=torch.Generator().manual_seed(0))
    pixels, channels = (draw(4, 3, 32, 32).sigmoid() * 255).byte(), (torch.full((3,), 0.5), torch.full((3,), 0.2))
    views = dict(size=24, local_size=12, local_crops=2, scale=(0.4, 1.0), local_scale=(0.05, 0.4))
    rough = ("svd_fast", "torch.linalg.svd")  # the second in float32
    cases = {
        f"gray, {name}": (lambda x, f=f: f(x, EPSILON), (tokens,), 1e-4 if name in rough else 2e-5)
        for name, f in GRAYINGS.items()
    }
    cases |= {
        f"TokenGraying and gradient, {name}{'' if rescale else ', not rescaled'}": (
            _with_gradient(graying.TokenGraying(name, EPSILON, 8, rescale=rescale)),
            (pictures,),
            1e-3,
        )
        for name in graying.METHODS
        for rescale in (True, False)
    }
    return cases | {
        "crop_flip": (lambda x, d: augment.crop_flip(x, d, padding=4), (pixels, shifts), 0),
        "normalise": (augment.normalise, (pixels, *channels), 1e-5),
        "multi_crop": (
            _seeded(lambda *given: multicrop.multi_crop(*given, **views)),
            (draw(4, 3, 32, 32), *channels),
            1e-4,
        ),
    }


def _model_cases() -> dict[str, tuple[Callable, tuple, float]]:
    images, cases = draw(4, 3, 32, 32), {}
    for family in FAMILIES:
        scalings = [(kind, form) for name, kind, form in SCALINGS if name == family]
        for skip in ("both", "none"):
            plain = small(family, skip=skip)
            cases[f"{family}, skip {skip}, and gradients"] = (_trained(plain), (images,), 1e-3)
            cases |= {
                f"{family}, skip {skip}, {kind} ({form}), and gradients": (
                    _trained(small(family, skip=skip, scaling=kind, scaling_form=form)),
                    (images,),
                    1e-3,
                )
                for kind, form in scalings
            }
        cases[f"{family}, probe"] = (_probed(small(family)), (images,), 1e-3)
    vit, features = small("vit", dynamic_img_size=True), draw(16, 12, 8, 8)
    # Classes of equal share have no gradient at the start, and AdamW steps in the direction of a rounding.
    masks = torch.randint(7, (16, 32, 32), generator=torch.Generator().manual_seed(0)).clamp(max=3)
    linear = _seeded(lambda x, shares: _fitted(*dense.fit_linear(x, shares, epochs=2, seed=0), x))
    frozen = dense.Backbone(vit, (0.5,) * 3, (0.2,) * 3)
    return cases | {
        "vit, skipless, and gradients": (_trained(small("vit", skip="none", init=SkiplessInit())), (images,), 1e-3),
        "dense features and keys": (
            _on_device(vit, lambda x: [frozen.features(x, 2, dense.SCALES), frozen.keys(x)]),
            (images,),
            1e-3,
        ),
        "class_shares": (lambda x: dense.class_shares(x, 4, 4), (masks,), 1e-6),
        "linear segmentation": (linear, (features, dense.class_shares(masks, 4, 4)), 1e-3),
        "TokenCut": (
            lambda x: [dense.second_eigenvector(x.flatten(0, 1)), torch.tensor(dense.token_cut(x))],
            (draw(8, 8, 6),),
            1e-8,
        ),
        "pca_rgb": (dense.pca_rgb, (features,), 1e-5),
    }


def small(family: str, **settings) -> torch.nn.Module:
    """Return the small model of a family, drawn on the CPU, in evaluation mode, its scaling (if any) not zero."""
    torch.manual_seed(0)
    size = {"img_size": 32} if family != "convmixer" else {}
    model = create_model(family, num_classes=10, **size, **SMALL[family], **settings).eval()
    for scale in scaling_parameters(model).values():
        torch.nn.init.constant_(scale, 0.3)
    return model


def _on_device(model: torch.nn.Module, function: Callable) -> Callable:
    """Return `function`, called after the model has been moved to where its first tensor is."""
    return lambda x, *others: (model.to(x.device), function(x, *others))[1]


def _trained(model: torch.nn.Module) -> Callable:
    """Return a function of images that gives the logits, and the gradients of all parameters as one vector."""

    def outputs(images: Tensor) -> list[Tensor]:
        logits = model(images)
        gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        return [logits, torch.cat([gradient.flatten() for gradient in gradients])]

    return _on_device(model, outputs)


def _probed(model: torch.nn.Module) -> Callable:
    """Return a function of images that gives all that the probe sees."""

    def outputs(images: Tensor) -> list[Tensor]:
        traces = probe.branch_outputs(model, images)
        seen = [part for trace in traces for part in vars(trace).values() if isinstance(part, Tensor)]
        attends = any(trace.kind == "attention" for trace in traces)
        return [probe.embeddings(model, images), *seen, *(probe.attention_maps(model, images) if attends else [])]

    return _on_device(model, outputs)


def _with_gradient(function: Callable) -> Callable:
    def outputs(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = function(x)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    return outputs


def _seeded(function: Callable) -> Callable:
    """Return `function`, drawing the same each time it is called."""
    return lambda *given: (torch.manual_seed(0), function(*given))[1]


def _fitted(layer: torch.nn.Conv2d, loss: float, features: Tensor) -> list:
    return [layer.weight, loss, layer(features)]


def parity(device: torch.device) -> list[dict]:
    """Compare every case on `device` with the CPU, in full float32; what one says as it fails is its difference."""
    rows = []
    for name, (function, given, allowed) in parity_cases().items():
        expected = _flat(function(*given))
        try:
            found = _flat(function(*(value.to(device) if isinstance(value, Tensor) else value for value in given)))
            differences = [
                (a - b).abs().max() / b.abs().max().clamp_min(1e-300) for a, b in zip(found, expected, strict=True)
            ]
            difference = float(torch.stack(differences).max())  # NaN where one is
        except RuntimeError as error:  # a tensor left on the other device, or an operation that the device lacks
            difference = str(error).partition("\n")[0]
        agrees = not isinstance(difference, str) and difference <= allowed
        rows.append({"function": name, "difference": difference, "allowed": allowed, "agrees": agrees})
    return rows


def _flat(outputs: object) -> list[Tensor]:
    """Return what a function gave, tensors or numbers in lists of any depth, as float64 tensors on the CPU."""
    if isinstance(outputs, list | tuple):
        return [tensor for output in outputs for tensor in _flat(output)]
    return [torch.as_tensor(outputs, dtype=torch.float64).detach().cpu()]
