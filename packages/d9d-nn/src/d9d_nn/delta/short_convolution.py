"""Short causal convolution of each feature over the positions of a document.

Shapes: B samples, S positions, F features, W positions that an output reads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution: ``out[t] = silu(sum over w of weight[:, w] * x[t - W + 1 + w])``; weight [F, W].

    Positions of other documents count as zeros.

    Args:
        features: F.
        width: W.
        bias: whether a bias [F] is added to the sum.
    """

    bias: nn.Parameter | None

    def __init__(self, features: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from a uniform distribution over ``[-1 / sqrt(W), 1 / sqrt(W)]``, as torch does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """Map [B, S, F] to the same shape and dtype; sums are computed in float32 or wider.

        Args:
            x: [B, S, F].
            documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.
        """
        width, length = self.weight.shape[1], x.shape[1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, weight = x.to(dtype), self.weight.to(dtype)
        out, place = wide * weight[:, -1], torch.arange(length, device=x.device)
        for distance in range(1, min(width, length)):
            known = place >= distance
            if documents is not None:
                known = known & (documents == torch.roll(documents, distance, 1))
            # Compiled, a padded copy would be kept for the backward, in float32; a rolled one is made again from x.
            earlier = torch.where(known.unsqueeze(-1), torch.roll(wide, distance, 1), 0.0)
            out = out + earlier * weight[:, width - 1 - distance]
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return functional.silu(out).to(x.dtype)
