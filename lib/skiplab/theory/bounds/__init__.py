"""Checks of every proposition and theorem of the three papers, which also test the theorem's hypotheses.

- `condition_numbers`: Always Skip Attention (arXiv 2505.01996, section 4) and Cutting the Skip (arXiv 2510.00345,
  propositions 1 and 2).
- `low_pass`: Anti-Oversmoothing in Deep Vision Transformers (arXiv 2203.05962), theorem 1 and corollary 2.
- `rates`: theorem 3 of the same paper, and its extensions to whole blocks.
- `checks`: the outcome of a check, and how both sides of an inequality are compared.

Most checks take a `form`. "paper" is the published statement with its published hypotheses; "repaired" is the nearest
statement that is true; any other form is sharper or more general, and the docstring proves it. At a counterexample to
a published statement `holds` is False in form "paper", and None (a hypothesis fails) in form "repaired".

Everything is computed in float64. A comparison allows a relative `TOLERANCE` and the rounding of the operations.
"""

from skiplab.theory.bounds.checks import TOLERANCE, BoundCheck
from skiplab.theory.bounds.condition_numbers import (
    cubic_condition,
    diagonal_rows,
    diffuse_rows,
    dominant_term,
    ffn_condition,
    skip_condition,
)
from skiplab.theory.bounds.low_pass import (
    dobrushin,
    low_pass_limit,
    low_pass_rate,
    product_low_pass,
    stationary_distribution,
)
from skiplab.theory.bounds.rates import (
    ACTIVATIONS,
    LOGITS,
    attention_gain,
    attention_logits,
    attention_rate,
    ffn_rate,
    layer_norm_rate,
    logit_bound,
    logit_check,
    multihead_rate,
    residual_rate,
)

__all__ = [
    "ACTIVATIONS",
    "LOGITS",
    "TOLERANCE",
    "BoundCheck",
    "attention_gain",
    "attention_logits",
    "attention_rate",
    "cubic_condition",
    "diagonal_rows",
    "diffuse_rows",
    "dobrushin",
    "dominant_term",
    "ffn_condition",
    "ffn_rate",
    "layer_norm_rate",
    "logit_bound",
    "logit_check",
    "low_pass_limit",
    "low_pass_rate",
    "multihead_rate",
    "product_low_pass",
    "residual_rate",
    "skip_condition",
    "stationary_distribution",
]
