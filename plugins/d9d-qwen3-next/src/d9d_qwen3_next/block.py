"""Layers of Qwen3-Next and Qwen3.5. Shapes: B samples, S positions, H features."""

from __future__ import annotations

from typing import ClassVar

from d9d_core.attention import Documents
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.decoder.block import DecoderBlock, grouped_query_attention, swiglu
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_nn.linear import Linear
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.rms_norm import OffsetRMSNorm
from d9d_nn.rope.rotary_embedding import Rotation
from d9d_qwen3.block import experts
from torch import Tensor, nn

from d9d_qwen3_next.config import AnyConfig, HybridConfig, Qwen3NextConfig


class HybridBlock(DecoderBlock):
    """Decoder block: Gated DeltaNet or gated attention, then a feed-forward layer.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
        ffn: feed-forward layer, see :class:`~d9d_nn.decoder.block.DecoderBlock`.
    """

    def __init__(self, config: HybridConfig, layer: int, ffn: nn.Module) -> None:
        self.is_recurrent = config.is_recurrent(layer)
        mixer = _gated_delta_net(config) if self.is_recurrent else _attention(config, layer)
        super().__init__(config, mixer, ffn, norm=OffsetRMSNorm)

    def attention_slots(self) -> list[AttentionSlot]:
        """Slots of attention kernels: one for attention, none for Gated DeltaNet."""
        return [] if self.is_recurrent else list(super().attention_slots())

    def mix(self, normed: Tensor, rotation: Rotation, documents: AttentionMasks | Documents) -> Tensor:
        """Apply attention or Gated DeltaNet, within each document: [B, S, H] to [B, S, H]."""
        if not self.is_recurrent:
            return super().mix(normed, rotation, documents)
        numbers = documents.documents if isinstance(documents, AttentionMasks) else documents
        return self.attention(normed, numbers)  # type: ignore[no-any-return]


class ExpertsBlock(HybridBlock):
    """Decoder block with experts, and an expert that all tokens share.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    routes: ClassVar[bool] = True

    def __init__(self, config: Qwen3NextConfig, layer: int) -> None:
        gate = Linear(config.hidden_size, 1, std=config.initialization.std)
        shared = swiglu(config, config.shared_expert_intermediate_size)
        super().__init__(config, layer, experts(config, shared_expert=shared, shared_gate=gate))


def build_block(config: AnyConfig, layer: int) -> HybridBlock:
    """Build one layer by its index in the whole model."""
    if isinstance(config, Qwen3NextConfig) and config.has_experts(layer):
        return ExpertsBlock(config, layer)
    return HybridBlock(config, layer, swiglu(config, config.intermediate_size))


def _attention(config: HybridConfig, layer: int) -> nn.Module:
    return grouped_query_attention(
        config, layer, head_norm_eps=config.rms_norm_eps, norm=OffsetRMSNorm, output_gate=True
    )


def _gated_delta_net(config: HybridConfig) -> nn.Module:
    return GatedDeltaNet(
        config.hidden_size,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        std=config.initialization.std,
        output_std=config.initialization.output_std(config.num_layers),
        norm_eps=config.rms_norm_eps,
        width=config.linear_conv_kernel_dim,
    )
