"""Op ``add_rms_norm``: residual addition, then RMSNorm of the sum, as at each branch of a residual stream.

Both touch each feature of a token once, forward and backward, so a kernel needs one pass over memory each way.

Shapes: D features, ``...`` any leading dims. The slot's static fact is ``features``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d9d_nn.ops.rms_norm import rms_norm


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Reference: ``x + added``, and :func:`~d9d_nn.ops.rms_norm.rms_norm` of this sum.

    Args:
        x: [..., D].
        added: [..., D], the shape of ``x``; ``None`` for nothing.
        weight: [D].
        eps: added to the mean square.
        dtype: of the norm; by default that of the sum.

    Returns:
        The norm and the sum, both [..., D]; the sum in the dtype that torch gives it, that of ``x`` unless ``added`` is
        wider.
    """
    total = x if added is None else x + added
    normed = rms_norm(total, weight, eps)
    return normed if dtype is None else normed.to(dtype), total
