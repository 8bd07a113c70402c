"""Decoder layer of Qwen3.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.traits import TensorStyle
from d9d_moe.experts.layer import MoELayer
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import Rotation
from torch import Tensor, nn

from d9d_qwen3.feed_forward import feed_forward
from d9d_qwen3.moe_config import AnyQwen3Config


class Qwen3Block(nn.Module):
    """Block of attention, then feed-forward, each normalised before and added to the residual stream.

    Args:
        config: config of the whole model.
        layer: index in the whole model.
    """

    def __init__(self, config: AnyQwen3Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, residual=True)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            query_heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            std=config.initialization.std,
            output_std=config.initialization.output_std(config.num_layers),
            head_norm_eps=config.rms_norm_eps,
            bias=config.attention_bias,
            window=config.window(layer),
        )
        self.ffn_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, residual=True)
        self.ffn = feed_forward(config, layer)
        self.has_experts = isinstance(self.ffn, MoELayer)

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the norms, between which tokens are split; attention and feed-forward have their own plans."""
        return {"attention_norm": TensorStyle.SEQUENCE, "ffn_norm": TensorStyle.SEQUENCE}

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        documents: AttentionMasks | Tensor | None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Map [B, S, H] to [B, S, H].

        Args:
            hidden: [B, S, H].
            rotation: see :class:`GroupedQueryAttention`, as for ``documents``.
            documents: documents, or the masks made of them.
            padding: bool [B, S], positions that experts leave out; ``None`` if there are none.
        """
        normed, hidden = self.attention_norm.branch(hidden, for_products=True)
        attended = self.attention(normed, rotation, documents)
        # A router's scores are not products with weights alone.
        normed, hidden = self.ffn_norm.branch(hidden, attended, for_products=not self.has_experts)
        return hidden + (self.ffn(normed, padding) if self.has_experts else self.ffn(normed))  # type: ignore[no-any-return]
