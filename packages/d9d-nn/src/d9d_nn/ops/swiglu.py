"""Op ``swiglu``: the whole SwiGLU feed-forward layer (Shazeer 2020, "GLU Variants Improve Transformer", equation 6).

A kernel may compute the gate where a product leaves its result, without a pass of its own over memory. The slot's
static facts are ``hidden`` and ``features``.

Shapes: H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from d9d_nn.ops.silu_mul import silu_mul


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Reference: three products, and :func:`~d9d_nn.ops.silu_mul.silu_mul` between them.

    Args:
        x: [..., H].
        gate_weight: [I, H].
        up_weight: [I, H].
        down_weight: [H, I].

    Returns:
        [..., H].
    """
    gate, up = functional.linear(x, gate_weight), functional.linear(x, up_weight)
    return functional.linear(silu_mul(gate, up), down_weight)
