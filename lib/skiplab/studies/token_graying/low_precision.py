"""Token Graying in low precision, against float64."""

from collections.abc import Sequence

import pandas
import torch
from torch import Tensor

from skiplab.companion.timing import one_thread
from skiplab.studies.token_graying.measures import FORMS, images, relative_distance
from skiplab.theory.conditioning import condition_number
from skiplab.transforms.graying import METHODS, patchify


def gram_gray(tokens: Tensor, epsilon: float) -> Tensor:
    """Gray as one would without thinking of precision: the Gram matrix in whatever type autocast gives."""
    gram = tokens @ tokens.mT
    values, q = torch.linalg.eigh(gram.to(torch.promote_types(gram.dtype, torch.float32)))
    ratio = (values / values[..., -1:]).clamp_min(0).sqrt()
    weight = torch.where(ratio > 1e-6, ratio.clamp_min(1e-6) ** (epsilon - 1), 0.0)
    return (q * weight[..., None, :]) @ q.mT @ tokens


def dense_dct_gray(tokens: Tensor, epsilon: float) -> Tensor:
    """Gray by the DCT as dense products in whatever type autocast gives."""
    rows, columns = (_dct_matrix(size).to(tokens) for size in tokens.shape[-2:])
    c = rows @ tokens @ columns.mT
    top = c.abs().amax((-2, -1), keepdim=True)
    return rows.mT @ (c.sign() * (c.abs() / top) ** epsilon * top) @ columns


def _dct_matrix(size: int) -> Tensor:
    k = torch.arange(size, dtype=torch.float64)
    matrix = (torch.pi / size * (k[None] + 0.5) * k[:, None]).cos() * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix


@one_thread()
def compare(epsilons: Sequence[float], patch_size: int = 16) -> pandas.DataFrame:
    """Gray photographs in float32, float16 and bfloat16, and compare with float64.

    A row per photograph, type, ε and way: "SVD" and "DCT" are this library's, tokens rounded to the type before and
    after; the other two run under autocast to it. `error` is the relative Frobenius error in percent, `kappa` that of
    the result, `kappa_error` its distance from the κ that the form has in float64, in percent (NaN where that is
    infinite: two of the photographs have patches without full rank).
    """
    names, batch = images()
    tokens, rows = patchify(batch, patch_size), []
    for epsilon in epsilons:
        exact = {form: METHODS[form](tokens.double(), epsilon) for form in FORMS}
        kappas = {form: condition_number(exact[form]) for form in FORMS}
        known = {form: kappa.where(kappa.isfinite(), torch.nan) for form, kappa in kappas.items()}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for way, form, gray in (
                ("SVD", "svd", METHODS["svd"]),
                ("DCT", "dct", METHODS["dct"]),
                ("SVD, Gram matrix by autocast", "svd", gram_gray),
                ("DCT, products by autocast", "dct", dense_dct_gray),
            ):
                with torch.autocast("cpu", dtype, enabled="autocast" in way and dtype != torch.float32):
                    grayed = gray(tokens if "autocast" in way else tokens.to(dtype), epsilon)
                kappa = condition_number(grayed.double())
                columns = {
                    "photograph": names,
                    "error": relative_distance(grayed, exact[form]).tolist(),
                    "kappa": kappa.tolist(),
                    "kappa_error": (100 * (kappa / known[form] - 1).abs()).tolist(),
                }
                rows.append(
                    pandas.DataFrame(columns).assign(dtype=str(dtype).removeprefix("torch."), way=way, epsilon=epsilon)
                )
    return pandas.concat(rows, ignore_index=True)
