"""The part of an attention layer where tokens look at each other; owns no parameters.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.ops import OpSlot
from torch import Tensor, nn

from d9d_nn.ops.attention import attention


class AttentionCore(nn.Module):
    """Causal attention inside documents. A module of its own, so that context parallelism can wrap it.

    Args:
        query_heads: N.
        key_value_heads: K.
        head_dim: D.
    """

    def __init__(self, *, query_heads: int, key_value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = OpSlot(
            "attention",
            attention,
            query_heads=query_heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            causal=True,
        )

    def op_slots(self) -> Mapping[str, OpSlot]:
        """The attention itself."""
        return {"attention": self.attention}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """See :func:`d9d_nn.ops.attention.attention`.

        Args:
            query: [B, S, N, D].
            key: [B, S, K, D].
            value: [B, S, K, D].
            documents: int64 [B, S]; ``None`` if a sample is one document.

        Returns:
            [B, S, N, D].
        """
        out: Tensor = self.attention(query, key, value, documents)
        return out
