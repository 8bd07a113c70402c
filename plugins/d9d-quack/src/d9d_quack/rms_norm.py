"""Backend ``quack`` of the op ``rms_norm``.

Shapes: D features.
"""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.kernel import OpSignature
from torch import Tensor


def build(_signature: OpSignature) -> RmsNorm:
    """Build the backend ``quack`` of the op ``rms_norm``; its function is the same for every signature."""
    # Imported here, because it takes seconds and the conditions of the backend do not need it.
    from quack.rmsnorm import rmsnorm

    return RmsNorm(rmsnorm)


class RmsNorm:
    """RMSNorm by QuACK, see :func:`d9d_nn.ops.rms_norm.rms_norm`; computed in float32, rounded once.

    Args:
        rmsnorm: the library's ``(x [..., D], weight [D], *, eps) -> [..., D]``, with a gradient.
    """

    def __init__(self, rmsnorm: Callable[..., Tensor]) -> None:
        self._rmsnorm = rmsnorm

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise rows.

        Args:
            x: [..., D].
            weight: [D], in any floating-point dtype.
            eps: added to the mean square.

        Returns:
            [..., D] in the dtype of ``x``.
        """
        if not x.numel():  # nothing to launch
            return (x * weight).to(x.dtype)
        return self._rmsnorm(x, weight.contiguous(), eps=eps)
