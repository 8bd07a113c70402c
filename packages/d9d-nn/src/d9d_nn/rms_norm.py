"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.extend import OpSlot
from torch import Tensor, nn

from d9d_nn.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Norm that scales the last dim to a root mean square of one, then by a weight per feature.

    Args:
        features: size of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, features: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.rms_norm = OpSlot("rms_norm", rms_norm, features=features)

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the norm."""
        return {"rms_norm": self.rms_norm}

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to the same shape and dtype."""
        out: Tensor = self.rms_norm(x, self.weight, self.eps)
        return out
