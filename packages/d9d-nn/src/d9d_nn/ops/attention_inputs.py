"""Op ``attention_inputs``: projections of queries, keys and values, head norms and rotations, as in Qwen3.

All three projections read the same rows, so a kernel can compute the gradient of these rows in one product, and the
gradient of the weights in another product, if the gradients of queries, keys and values are adjacent in memory.

Shapes: B samples, S positions, H features, N query heads, K key heads, D features of a head. The op's signature has the
static facts ``hidden``, ``head_dim``, ``query_heads`` and ``key_heads``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from d9d_nn.linear import are_only_products
from d9d_nn.ops.deferred import as_autocast, as_autocast_together
from d9d_nn.ops.normed_rope import normed_rope
from d9d_nn.ops.whole import WholeSlot


def attention_inputs(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of attention inputs: three products, and :func:`~d9d_nn.ops.normed_rope.normed_rope` of the first two.

    Args:
        x: [B, S, H].
        query_weight: [N * D, H].
        key_weight: [K * D, H].
        value_weight: [K * D, H].
        query_norm: weight of the norm of query heads, [D].
        key_norm: weight of the norm of key heads, [D].
        cos: float32 [B or 1, S, D/2], see :func:`d9d_nn.ops.rope.rope`.
        sin: float32 [B or 1, S, D/2].
        eps: added to the mean squares.

    Returns:
        Queries [B, S, N, D], keys [B, S, K, D] and values [B, S, K, D], in the dtype of ``x``.
    """
    query, key, value = (project(x, weight, query_norm.shape[0]) for weight in (query_weight, key_weight, value_weight))
    return *normed_rope(query, key, query_norm, key_norm, cos, sin, eps), value


def project(x: Tensor, weight: Tensor, features: int) -> Tensor:
    """Heads [B, S, heads, ``features``] of rows x [B, S, H], by a weight [heads * ``features``, H]."""
    return functional.linear(x, weight).view(*x.shape[:-1], weight.shape[0] // features, features)


def attention_inputs_slot(**facts: Any) -> WholeSlot:
    """Op slot by which one kernel can replace ``q_proj``, ``k_proj``, ``v_proj``, their norms and the rotation."""
    parts = ("normed_rope", "rms_norm", "rope")
    return WholeSlot("attention_inputs", attention_inputs, arguments=_arguments, fits=_fits, parts=parts, **facts)


def _arguments(module: Any, hidden: Tensor, rotation: Any) -> tuple[Any, ...]:
    layers = module.q_proj, module.k_proj, module.v_proj
    norms = module.q_norm.factor(), module.k_norm.factor()
    weights = *as_autocast_together([layer.weight for layer in layers]), *norms
    return as_autocast(hidden), *weights, rotation.cos, rotation.sin, module.q_norm.eps


def _fits(module: Any) -> bool:
    return are_only_products(module.q_proj, module.k_proj, module.v_proj)
