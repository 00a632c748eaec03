"""What the theorems say about the blocks of a trained ViT, in float64 on the CPU."""

import math

import pandas
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.models.matrices import Weights, logits, sab, weights
from skiplab.studies.low_pass.layers import block_inputs
from skiplab.theory import bounds
from skiplab.theory.bounds import BoundCheck
from skiplab.theory.jacobian import attention_jacobian, jacobian_kappa
from skiplab.theory.spectral import hc


@torch.no_grad()
def check_model(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Apply the checks of `skiplab.theory.bounds` to every block of a ViT and every image: a row per check.

    Columns: `claim` (the statement's id in the ledger), block, image, holds (None where a hypothesis fails), slack, and
    `failed`, the hypotheses that fail.
    """
    rows, stacks = [], [[] for _ in images]
    for number, (block, x) in enumerate(block_inputs(model, images), start=1):
        w, normed = weights(block), block.norm1(x)
        between = x + sab(block, x)
        p, second = logits(block, normed), block.norm2(between)
        for image in range(len(x)):
            stacks[image].append(torch.softmax(p[image], dim=-1).mean(dim=0))
            found = {
                **_attention_checks(block, w, x[image], normed[image], p[image]),
                **_ffn_checks(block, w, between[image], second[image]),
            }
            rows += [_row(claim, number, image, check) for claim, check in found.items()]
    rows += [
        _row("anti.cor2.dobrushin", len(stack), image, bounds.product_low_pass(torch.stack(stack)))
        for image, stack in enumerate(stacks)
    ]
    return pandas.DataFrame(rows)


def _row(claim: str, block: int, image: int, check: BoundCheck) -> dict:
    failed = [name for name, true in check.hypotheses.items() if not true]
    return {
        "claim": claim,
        "block": block,
        "image": image,
        "holds": check.holds,
        "slack": check.slack,
        "failed": failed,
    }


def _attention_checks(block: Block, w: Weights, x: Tensor, z: Tensor, p: Tensor) -> dict[str, BoundCheck]:
    """Check what the papers say about one SAB; for what is about one head, its first."""
    w_q, w_k, w_v = w.head(0)
    branch = sab(block, x[None])[0]
    linear = torch.zeros(len(w.w_v), len(w.w_v), dtype=torch.float64)  # Z M is what linear attention returns
    for head, w_o in enumerate(w.w_o.chunk(w.heads)):
        q, k, v = w.head(head)
        linear = linear + q @ k.mT @ (z.mT @ z) @ v @ w_o * block.attn.scale / len(z)
    whole = bounds.multihead_rate(z, p, w.w_v, w.w_o, "whole")
    factor = bounds.layer_norm_rate(x, block.norm1.weight, block.norm1.eps)
    rate = whole.bound / float(matrix_norm(hc(z))) * factor.bound / float(matrix_norm(hc(x)))
    return {
        "asa.prop41.as_stated": bounds.cubic_condition(z, w_q, w_k, w_v, "paper"),
        "asa.prop41.repaired": bounds.cubic_condition(z, w_q, w_k, w_v),
        "asa.prop41.definite": bounds.cubic_condition(z, w_q, w_k, w_v, "definite"),
        "asa.prop42.as_stated": bounds.skip_condition(z, linear, "paper"),
        "asa.prop42.ratio": bounds.skip_condition(z, linear),
        "asa.prop42.definite": bounds.skip_condition(z, linear, "definite"),
        "asa.prop42.sufficient": bounds.skip_condition(z, linear, "lowers"),
        "anti.thm1.repaired": bounds.low_pass_limit(torch.softmax(p[0], dim=-1), z),
        "anti.thm1.lambda2_bound": bounds.low_pass_rate(torch.softmax(p[0], dim=-1), z, 1, "paper"),
        "anti.thm3.as_stated": bounds.attention_rate(z, p[0], w_v),
        "anti.thm3.row_range": bounds.attention_rate(z, p[0], w_v, "range"),
        "anti.thm3.sharp": bounds.attention_rate(z, p[0], w_v, "sharp"),
        "anti.ext.multihead": bounds.multihead_rate(z, p, w.w_v, w.w_o),
        "anti.ext.multihead_whole": whole,
        "anti.thm3.block": _scaled(whole, float(matrix_norm(hc(x))) / float(matrix_norm(hc(z)))),
        "anti.thm3.layernorm": _scaled(whole, factor.bound / float(matrix_norm(hc(z)))),
        "anti.ext.skip": bounds.residual_rate(x, branch, rate),
        "anti.thm3.logits_dot": bounds.logit_check("dot", z, w_q, w_k),
        "anti.thm3.logits_l2": bounds.logit_check("l2", z, w_q, w_k),
        "cut.prop1.diffuse": bounds.diffuse_rows(p[0]),
    }


def _ffn_checks(block: Block, w: Weights, x: Tensor, z: Tensor) -> dict[str, BoundCheck]:
    return {
        "asa.ffn.as_stated": bounds.ffn_condition(z, w.w_up, w.w_down, "paper"),
        "asa.ffn.repaired": bounds.ffn_condition(z, w.w_up, w.w_down),
        "asa.ffn.product": bounds.ffn_condition(z, w.w_up, w.w_down, "product"),
        "anti.ext.ffn": bounds.ffn_rate(z, w.w_up, w.w_down, w.b_up),
    }


def _scaled(check: BoundCheck, factor: float) -> BoundCheck:
    """Return a check with its bound multiplied: that of the block's own input in place of the normed one."""
    bound = check.bound * factor
    holds = check.measured <= bound * (1 + bounds.TOLERANCE)
    return BoundCheck(
        check.name, check.measured, bound, check.hypotheses, holds, check.slack + math.log(factor), check.log_ratio
    )


def failed_hypotheses(checks: pandas.DataFrame) -> pandas.DataFrame:
    """Return the percentage of cases of `check_model` in which each hypothesis fails, by claim and hypothesis."""
    cases = checks.groupby("claim", sort=False).size()
    failed = checks.explode("failed").dropna(subset="failed").groupby(["claim", "failed"], sort=False).size()
    table = failed.rename("fails in % of cases").reset_index().rename(columns={"failed": "hypothesis"})
    table["fails in % of cases"] = (100 * table["fails in % of cases"] / table.claim.map(cases)).round(0).astype(int)
    return table


@torch.no_grad()
def jacobian_kappas(model: nn.Module, images: Tensor, tokens: int) -> pandas.DataFrame:
    """Return ln κ of the attention's Jacobian K at z = LN(x) and of K + I, for the first, middle and last block.

    On the first image, its first `tokens` tokens, and without biases: a dense K has (tokens · d)² entries.
    """
    rows = []
    found = list(block_inputs(model, images[:1]))
    for number in sorted({0, len(found) // 2, len(found) - 1}):
        block, x = found[number]
        w = weights(block)
        z = block.norm1(x)[0, :tokens]
        bare, skipped = jacobian_kappa(attention_jacobian(z, w.w_q, w.w_k, w.w_v, w.w_o, w.heads))
        rows.append({"block": number + 1, "bare": math.log(bare), "with skip": math.log(skipped)})
    return pandas.DataFrame(rows)
