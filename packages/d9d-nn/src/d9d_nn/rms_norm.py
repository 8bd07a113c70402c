"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.kernel import OpSlot
from torch import Tensor, nn

from d9d_nn.ops.add_rms_norm import add_rms_norm_slot
from d9d_nn.ops.rms_norm import rms_norm
from d9d_nn.ops.whole import in_one_op


class RMSNorm(nn.Module):
    """RMSNorm layer: scales the last dim to a root mean square of one, then by a weight per feature.

    Args:
        features: size of the last dim.
        eps: added to the mean square.
        residual: whether :meth:`branch` is what is called, so that kernels may add and normalise at once.
        for_products: see :func:`~d9d_nn.ops.add_rms_norm.add_rms_norm_slot`.
    """

    def __init__(self, features: int, *, eps: float, residual: bool = False, for_products: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.rms_norm = OpSlot("rms_norm", rms_norm, features=features)
        self.add_rms_norm = add_rms_norm_slot(features, for_products=for_products)
        self._residual = residual

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the norm, and at branches of addition and norm, unless somebody has replaced the forward."""
        whole = {"add_rms_norm": self.add_rms_norm} if self._residual and self.is_plain() else {}
        return {"rms_norm": self.rms_norm, **whole}

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to the same shape and dtype."""
        out: Tensor = self.rms_norm(x, self.weight, self.eps)
        return out

    @in_one_op("add_rms_norm")
    def branch(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add what the last branch returned to the residual stream, and normalise the stream for the next branch.

        Args:
            x: [..., features], the residual stream.
            added: [..., features], what is added to it; ``None`` for nothing.

        Returns:
            The norm [..., features], and the residual stream [..., features] from here on.
        """
        total = x if added is None else x + added
        return self(total), total

    def is_plain(self) -> bool:
        """Whether nobody has put anything in the place of :meth:`forward`, so that a kernel may."""
        return type(self).forward is RMSNorm.forward and "forward" not in vars(self)
