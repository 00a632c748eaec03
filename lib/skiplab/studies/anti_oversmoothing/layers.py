"""What AttnScale and FeatScale do to tokens and attention maps, layer by layer."""

import pandas
import torch
from torch import Tensor, nn
from torch.linalg import matrix_norm

from skiplab.models import probe, zoo
from skiplab.studies.anti_oversmoothing.identities import attn_scale
from skiplab.theory.spectral import hc, signal_spectrum, token_similarity


def acting_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the maps (B, h, n, n) that act in each block of a ViT: AttnScale's Â where it has that, else A."""
    return [
        attn_scale(attn, block.attn.omega.detach()) if hasattr(block.attn, "omega") else attn
        for (_, block), attn in zip(zoo.blocks(model), probe.attention_maps(model, images), strict=True)
    ]


def band_gains(model: nn.Module, images: Tensor) -> Tensor:
    """Return the gain of each band of the acting maps, averaged over images: (L, h, n)."""
    return torch.stack([signal_spectrum(attn).double().mean(dim=0) for attn in acting_maps(model, images)])


def high_pass(gains: Tensor) -> float:
    """Return the mean gain of the upper half of the bands, over blocks and heads, from `band_gains`."""
    return float(gains[..., torch.fft.fftfreq(gains.shape[-1]).abs() > 0.25].mean())


@torch.no_grad()
def by_layer(model: nn.Module, images: Tensor) -> pandas.DataFrame:
    """Return, after each block of a ViT and averaged over images, how alike and how uneven tokens and maps are.

    Columns: `features`, the mean cosine of different tokens; `attention`, that of different rows of the acting maps;
    `hc_share`, ‖HC[X]‖_F/‖X‖_F in percent.
    """
    tokens = after_blocks(model, probe.branch_outputs(model, images))
    return pandas.DataFrame(
        [
            {
                "layer": layer,
                "features": float(token_similarity(x).mean()),
                "hc_share": hc_share(x),
                "attention": float(token_similarity(attn).mean()),
            }
            for layer, (x, attn) in enumerate(zip(tokens, acting_maps(model, images), strict=True), start=1)
        ]
    )


def after_blocks(model: nn.Module, traces: list[probe.BlockTrace]) -> list[Tensor]:
    """Return the tokens (B, n, d) after each block, whichever skips the blocks have."""
    last = traces[-1]
    has_skip = getattr(zoo.blocks(model)[-1][1], "ffn_skip", True)
    return [trace.tokens for trace in traces[1:]] + [last.ffn_with_input if has_skip else last.ffn]


def hc_share(x: Tensor) -> float:
    return float(100 * (matrix_norm(hc(x)) / matrix_norm(x)).mean())
