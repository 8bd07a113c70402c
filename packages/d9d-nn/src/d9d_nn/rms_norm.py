"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.kernel import OpSlot
from torch import Tensor, nn

from d9d_nn.linear import has_hooks
from d9d_nn.ops.add_rms_norm import add_rms_norm
from d9d_nn.ops.deferred import autocast_dtype
from d9d_nn.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Norm that scales the last dim to a root mean square of one, then by a weight per feature.

    Args:
        features: size of the last dim.
        eps: added to the mean square.
        residual: whether :meth:`branch` is what is called, so that kernels may add and normalise at once.
    """

    def __init__(self, features: int, *, eps: float, residual: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.rms_norm = OpSlot("rms_norm", rms_norm, features=features)
        self.add_rms_norm = OpSlot("add_rms_norm", add_rms_norm, parts=("rms_norm",), features=features)
        self._residual = residual

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the norm, and at branches of addition and norm, unless somebody has replaced the forward."""
        whole = {"add_rms_norm": self.add_rms_norm} if self._residual and self._is_plain() else {}
        return {"rms_norm": self.rms_norm, **whole}

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to the same shape and dtype."""
        out: Tensor = self.rms_norm(x, self.weight, self.eps)
        return out

    def branch(self, x: Tensor, added: Tensor | None = None, *, for_products: bool = False) -> tuple[Tensor, Tensor]:
        """Add what the last branch returned to the residual stream, and normalise the stream for the next branch.

        Args:
            x: [..., features], the residual stream.
            added: [..., features], what is added to it; ``None`` for nothing.
            for_products: whether products with weights are all that reads the norm. Autocast rounds their arguments, so
                a kernel may round the norm at once.

        Returns:
            The norm [..., features], and the residual stream [..., features] from here on.
        """
        if self.add_rms_norm.backend != "reference" and self._is_plain() and not has_hooks(self):
            dtype = autocast_dtype(x) if for_products else None
            both: tuple[Tensor, Tensor] = self.add_rms_norm(x, added, self.weight, self.eps, dtype)
            return both
        total = x if added is None else x + added
        return self(total), total

    def _is_plain(self) -> bool:
        """Whether nobody has put anything in the place of :meth:`forward`, so that a kernel may."""
        return type(self).forward is RMSNorm.forward and "forward" not in vars(self)
