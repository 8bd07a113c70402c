"""Op ``add_rms_norm``: residual addition, then RMSNorm of the sum, as in each branch of a residual stream.

Both read each feature of a token once, forward and backward, so a kernel needs one pass over memory in each direction.

Shapes: D features, ``...`` any leading dims. The slot's static fact is ``features``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d9d_nn.linear import has_hooks
from d9d_nn.ops.deferred import autocast_dtype
from d9d_nn.ops.rms_norm import rms_norm
from d9d_nn.ops.whole import WholeSlot


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Reference of the op add-RMSNorm: ``x + added``, and :func:`~d9d_nn.ops.rms_norm.rms_norm` of this sum.

    Args:
        x: [..., D].
        added: [..., D], the shape of ``x``; ``None`` for nothing.
        weight: [D].
        eps: added to the mean square.
        dtype: of the norm; by default the dtype of the sum.

    Returns:
        The norm and the sum, both [..., D]; the sum in the dtype of torch's result: the dtype of ``x``, unless
        ``added`` is wider.
    """
    total = x if added is None else x + added
    normed = rms_norm(total, weight, eps)
    return normed if dtype is None else normed.to(dtype), total


def add_rms_norm_slot(features: int, *, for_products: bool) -> WholeSlot:
    """Slot of the addition and the norm at a branch.

    Args:
        features: D.
        for_products: whether only products with weights read the norm. Autocast rounds their arguments, so a kernel may
            round the norm itself.
    """

    def arguments(module: Any, x: Tensor, added: Tensor | None = None) -> tuple[Any, ...]:
        return x, added, module.factor(), module.eps, autocast_dtype(x) if for_products else None

    def fits(module: Any) -> bool:
        return module.is_plain() and not has_hooks(module)

    return WholeSlot(
        "add_rms_norm", add_rms_norm, arguments=arguments, fits=fits, parts=("rms_norm",), features=features
    )
