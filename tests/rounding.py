"""How large rounding errors may become: from the size of a computation, not from what one machine gave."""

import torch


def roundoff(dtype: torch.dtype, *terms: float) -> float:
    """Return the relative error to allow a chain of sums with so many `terms` each, computed in `dtype`.

    Each operation errs by at most the unit roundoff u. In a sum of n terms these errors add up like a random walk, to
    about √n u of the terms' size, in whatever order a processor adds; those of sums in a chain add up at worst. The
    largest of many thousand entries lies within 4 standard deviations. A product, a quotient or an exponential is a
    sum of 1 term; a sum of b terms of size b times the result (cancellation) counts as b² times its number of terms.
    """
    return 4 * torch.finfo(dtype).eps / 2 * sum(n**0.5 for n in terms)
