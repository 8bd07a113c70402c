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
        residual: whether callers use :meth:`branch`, so that one kernel may add and normalise.
        for_products: whether only matrix products read the result of :meth:`branch`; see
            :func:`~d9d_nn.ops.add_rms_norm.add_rms_norm_slot`.
    """

    def __init__(self, features: int, *, eps: float, residual: bool = False, for_products: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features))
        self.rms_norm = OpSlot("rms_norm", rms_norm, features=features)
        self.add_rms_norm = add_rms_norm_slot(features, for_products=for_products)
        self._residual = residual
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def factor(self) -> Tensor:
        """Factor of each feature, [features]: the weight itself."""
        return self.weight

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slots of the ops ``rms_norm`` and, with ``residual``, ``add_rms_norm``; none if the forward was replaced."""
        whole = {"add_rms_norm": self.add_rms_norm} if self._residual and self.is_plain() else {}
        return {"rms_norm": self.rms_norm, **whole}

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to the same shape and dtype."""
        out: Tensor = self.rms_norm(x, self.factor(), self.eps)
        return out

    @in_one_op("add_rms_norm")
    def branch(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add the output of the last branch to the residual stream, and normalise the stream for the next branch.

        Args:
            x: [..., features], the residual stream.
            added: [..., features], added to the stream; ``None`` to add nothing.

        Returns:
            The normalised stream [..., features], and the stream before the norm [..., features].
        """
        total = x if added is None else x + added
        return self(total), total

    def is_plain(self) -> bool:
        """Whether :meth:`forward` was not replaced, so that a kernel may replace it."""
        return type(self).forward is RMSNorm.forward and "forward" not in vars(self)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm layer whose factors are ``1 + weight`` (Gemma team 2024, "Gemma 2"); the weight starts at zero.

    Weight decay and rounding thus act on the difference from one. Kernels get the factors in float32 or wider.
    """

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    def factor(self) -> Tensor:
        """Factor of each feature, [features]: ``1 + weight``, not rounded to the dtype of the weight."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
