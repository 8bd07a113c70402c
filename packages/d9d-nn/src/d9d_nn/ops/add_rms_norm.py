"""Op ``add_rms_norm``: residual addition, then RMSNorm of the sum, as in each branch of a residual stream.

Addition and norm read each feature of a token once, forward and backward, so one kernel can compute them in one pass
over memory in each direction.

Shapes: D features, ``...`` any leading dims. Backends read the slot's static fact ``features``.
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
        dtype: dtype of the norm; by default the dtype of the sum.

    Returns:
        The norm and the sum, both [..., D]. The sum has the dtype of torch's type promotion: the dtype of ``x``, unless
        ``added`` is wider.
    """
    total = x if added is None else x + added
    normed = rms_norm(total, weight, eps)
    return normed if dtype is None else normed.to(dtype), total


def add_rms_norm_slot(features: int, *, for_products: bool) -> WholeSlot:
    """Slot of the addition and the norm before a branch of the residual stream, such as attention.

    Args:
        features: D.
        for_products: whether only matrix products read the norm. Autocast rounds the arguments of products, so a kernel
            may then round the norm itself.
    """

    def arguments(module: Any, x: Tensor, added: Tensor | None = None) -> tuple[Any, ...]:
        return x, added, module.factor(), module.eps, autocast_dtype(x) if for_products else None

    def fits(module: Any) -> bool:
        return module.is_plain() and not has_hooks(module)

    return WholeSlot(
        "add_rms_norm", add_rms_norm, arguments=arguments, fits=fits, parts=("rms_norm",), features=features
    )
