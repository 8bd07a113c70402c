"""Op ``swiglu``: the whole SwiGLU feed-forward layer (Shazeer 2020, "GLU Variants Improve Transformer", equation 6).

A kernel may compute the gate directly after a product, without a separate pass over memory. Backends read the slot's
static facts ``hidden`` and ``features``.

Shapes: H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from d9d_nn.linear import are_only_products
from d9d_nn.ops.deferred import as_autocast, as_autocast_together
from d9d_nn.ops.silu_mul import silu_mul
from d9d_nn.ops.whole import WholeSlot


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


def swiglu_slot(hidden: int, features: int) -> WholeSlot:
    """Slot of a feed-forward layer with ``gate_proj``, ``up_proj`` and ``down_proj``, of H and I features."""
    facts = {"hidden": hidden, "features": features}
    return WholeSlot("swiglu", swiglu, arguments=_arguments, fits=_fits, parts=("silu_mul",), **facts)


def _arguments(module: Any, hidden: Tensor) -> tuple[Any, ...]:
    gate_and_up = as_autocast_together([module.gate_proj.weight, module.up_proj.weight])
    return as_autocast(hidden), *gate_and_up, as_autocast(module.down_proj.weight)


def _fits(module: Any) -> bool:
    return are_only_products(module.gate_proj, module.up_proj, module.down_proj)
