"""Op ``silu_mul``: the gate of SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Reference: ``gate * sigmoid(gate) * up``.

    Args:
        gate: [..., I], I features of the feed-forward layer.
        up: [..., I].

    Returns:
        [..., I] in the dtype of the arguments.
    """
    return functional.silu(gate) * up
