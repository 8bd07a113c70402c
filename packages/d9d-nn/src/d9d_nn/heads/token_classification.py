"""Head that classifies tokens. Shapes: B samples, S positions, H features, C classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenClassificationHead(nn.Module):
    """Token classification head: projects each position to classes; weight [C, H], bias [C] as in transformers.

    Args:
        hidden_size: H.
        num_classes: C.
        std: standard deviation of the initial weights; the bias is zero at first.
    """

    def __init__(self, hidden_size: int, num_classes: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_classes, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std), and set the bias to zero."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """Map hidden states [B, S, H] to ``{"class_logits": float32 [B, S, C]}``; padding gets logits, too."""
        logits = functional.linear(hidden, self.weight, self.bias)
        return {"class_logits": logits.to(torch.promote_types(logits.dtype, torch.float32))}
