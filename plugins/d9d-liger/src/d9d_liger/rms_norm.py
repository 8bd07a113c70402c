"""Backend ``liger`` of the op ``rms_norm``.

Shapes: D features.
"""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.kernel import OpSignature
from liger_kernel.ops import LigerRMSNormFunction
from torch import Tensor


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``liger`` of the op ``rms_norm``; its function is the same for every signature."""
    return rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, see :func:`d9d_nn.ops.rms_norm.rms_norm`; computed in float32, rounded once.

    Args:
        x: [..., D].
        weight: [D], in any floating-point dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of ``x``.
    """
    if not x.numel():  # nothing to launch
        return (x * weight).to(x.dtype)
    # "gemma" computes everything in float32. Not in place: the backward would overwrite the gradient of the output,
    # which autograd may still need.
    offset, casting_mode, in_place = 0.0, "gemma", False
    out: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode, in_place)
    return out
