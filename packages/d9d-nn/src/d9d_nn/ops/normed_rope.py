"""Op ``normed_rope``: RMSNorm of each query and key head, then their rotation, as in Qwen3.

Norm and rotation read each feature of a head once, so one kernel needs one pass over memory, where two ops need two.

Shapes: B samples, S positions, N query heads, K key heads, D features of a head. The slot's static facts are
``head_dim``, ``query_heads`` and ``key_heads``; a tensor-parallel rank has fewer heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from d9d_nn.ops.rms_norm import rms_norm
from d9d_nn.ops.rope import rope
from d9d_nn.ops.whole import WholeSlot


def normed_rope(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Reference: :func:`~d9d_nn.ops.rms_norm.rms_norm` over the features of each head, then the rotation.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        query_weight: [D].
        key_weight: [D].
        cos: float32 [B or 1, S, D/2], see :func:`d9d_nn.ops.rope.rope`.
        sin: float32 [B or 1, S, D/2].
        eps: added to the mean square.

    Returns:
        Query and key, shapes and dtypes unchanged.
    """
    return rope(rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps), cos, sin)


def normed_rope_slot(**facts: Any) -> WholeSlot:
    """Slot of the norms ``q_norm`` and ``k_norm`` and the rotation; a layer without head norms does not offer it."""
    return WholeSlot("normed_rope", normed_rope, arguments=_arguments, parts=("rms_norm", "rope"), **facts)


def _arguments(module: Any, query: Tensor, key: Tensor, rotation: Any) -> tuple[Any, ...]:
    weights = module.q_norm.factor(), module.k_norm.factor()
    return query, key, *weights, rotation.cos, rotation.sin, module.q_norm.eps
