"""Layer of a decoder.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from d9d_core.attention import Documents
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.geglu import GeGLU
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import Rotation
from d9d_nn.swiglu import SwiGLU


class DecoderBlock(nn.Module):
    """Decoder block: attention, then feed-forward, each with a norm before and added to the residual stream.

    Args:
        config: config of the whole model.
        attention: attention layer, maps [B, S, H], a rotation and masks to [B, S, H]. A subclass with another layer in
            which tokens mix overrides :meth:`mix` and :meth:`attention_slots`.
        ffn: feed-forward layer, maps [B, S, H] to [B, S, H]; a layer with experts also takes ``padding``.
        norm: class of the norms.

    Attributes:
        routes: whether the feed-forward layer routes tokens to experts. Such a layer skips padding, and its router also
            reads the norm's output, so the norm is not read by matrix products alone.
    """

    routes: ClassVar[bool] = False

    def __init__(
        self,
        config: DecoderConfig,
        attention: nn.Module,
        ffn: nn.Module,
        *,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        of_stream = partial(norm, config.hidden_size, eps=config.rms_norm_eps, residual=True)
        self.attention_norm = of_stream(for_products=True)
        self.attention = attention
        self.ffn_norm = of_stream(for_products=not self.routes)
        self.ffn = ffn

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the norms, which compute a share of the positions; the other layers have their own plans."""
        return {"attention_norm": TensorStyle.SEQUENCE, "ffn_norm": TensorStyle.SEQUENCE}

    def attention_slots(self) -> Sequence[AttentionSlot]:
        """Slots of the layer's attention, for which the model prepares masks; empty for a layer without attention."""
        core: Any = self.attention.core
        return [core.attention]

    def mix(self, normed: Tensor, rotation: Rotation, documents: AttentionMasks | Documents) -> Tensor:
        """Mix tokens of the same document: map the norm's output [B, S, H] to [B, S, H]; see :meth:`forward`."""
        return self.attention(normed, rotation, documents)  # type: ignore[no-any-return]

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        documents: AttentionMasks | Documents,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Run the layer: map the residual stream before it to the residual stream after it, [B, S, H] each.

        Args:
            hidden: [B, S, H], the residual stream.
            rotation: rotation of each position.
            documents: indices of documents int64 [B, S] or ``DocumentBlocks``, or the attention masks made from them.
            padding: bool [B, S], padded positions, which experts skip; ``None`` if there is no padding.
        """
        normed, hidden = self.attention_norm.branch(hidden)  # [B, S, H] each
        attended = self.mix(normed, rotation, documents)  # [B, S, H]
        normed, hidden = self.ffn_norm.branch(hidden, attended)  # [B, S, H] each: norm of the sum, and the sum
        added: Tensor = self.ffn(normed, padding) if self.routes else self.ffn(normed)
        return hidden + added  # [B, S, H]


class RoutedBlock(DecoderBlock):
    """Decoder block whose feed-forward layer routes tokens to experts, and is called with the padding too.

    Args:
        config: config of the whole model.
        attention: attention layer.
        ffn: feed-forward layer; it maps [B, S, H] and the padding to [B, S, H].
        norm: class of the norms.
    """

    routes: ClassVar[bool] = True


class SandwichBlock(DecoderBlock):
    """Decoder block with four norms: the outputs of attention and feed-forward are normalised before they are added.

    Ding et al. 2021, "CogView", section 2.4, call it sandwich norm; Gemma 2 and 3 use it.

    Args:
        config: config of the whole model.
        attention: attention layer.
        ffn: feed-forward layer.
        norm: class of the norms.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: nn.Module,
        ffn: nn.Module,
        *,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__(config, attention, ffn, norm=norm)
        self.post_attention_norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_ffn_norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the four norms, which compute a share of the positions."""
        outputs = dict.fromkeys(("post_attention_norm", "post_ffn_norm"), TensorStyle.SEQUENCE)
        return {**super().tensor_parallel_plan(), **outputs}

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        documents: AttentionMasks | Documents,
        padding: Tensor | None = None,  # noqa: ARG002 - for layers that route
    ) -> Tensor:
        """Run the layer on the residual stream [B, S, H], see :meth:`DecoderBlock.forward`."""
        normed, hidden = self.attention_norm.branch(hidden)  # [B, S, H] each
        attended = self.post_attention_norm(self.mix(normed, rotation, documents))  # [B, S, H]
        normed, hidden = self.ffn_norm.branch(hidden, attended)  # [B, S, H] each: norm of the sum, and the sum
        return hidden + self.post_ffn_norm(self.ffn(normed))  # type: ignore[no-any-return]  # [B, S, H]


def grouped_query_attention(
    config: DecoderConfig,
    layer: int,
    *,
    head_norm_eps: float | None = None,
    softcap: float | None = None,
    norm: type[RMSNorm] = RMSNorm,
    interleaved: bool = False,
    sinks: bool = False,
    output_gate: bool = False,
) -> GroupedQueryAttention:
    """Build the grouped-query attention of a decoder block.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
        head_norm_eps: epsilon of an RMSNorm of each query and key head before the rotation; ``None`` for no norm.
        softcap: soft cap of the scores; ``None`` for no cap.
        norm: class of the head norms.
        interleaved: whether neighbouring features 2 i and 2 i + 1 are a pair that rotates.
        sinks: whether each query head has a learned sink.
        output_gate: whether the output of each head is multiplied by the sigmoid of a gate, feature by feature.
    """
    return GroupedQueryAttention(
        config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        std=config.initialization.std,
        output_std=config.initialization.output_std(config.num_layers),
        head_norm_eps=head_norm_eps,
        biases=config.biased_projections(),
        window=config.window(layer),
        softcap=softcap,
        norm=norm,
        rotary_dim=config.rope(layer).features,
        interleaved=interleaved,
        sinks=sinks,
        output_gate=output_gate,
        mask=config.mask_kind(),
    )


def swiglu(config: DecoderConfig, intermediate_size: int) -> SwiGLU:
    """Build a SwiGLU feed-forward layer with ``intermediate_size`` inner features."""
    output_std = config.initialization.output_std(config.num_layers)
    return SwiGLU(config.hidden_size, intermediate_size, std=config.initialization.std, output_std=output_std)


def geglu(config: DecoderConfig, intermediate_size: int) -> GeGLU:
    """Build a GeGLU feed-forward layer with ``intermediate_size`` inner features."""
    output_std = config.initialization.output_std(config.num_layers)
    return GeGLU(config.hidden_size, intermediate_size, std=config.initialization.std, output_std=output_std)
