"""Gemma, whole or as one pipeline stage. Shapes: B samples, S positions, H features."""

from __future__ import annotations

import torch
from d9d_core.model import Stage
from d9d_nn.decoder.block import SandwichBlock, geglu, grouped_query_attention
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.rms_norm import OffsetRMSNorm
from torch import Tensor

from d9d_gemma.config import GemmaConfig


class GemmaBlock(SandwichBlock):
    """Transformer block: attention with a soft cap or head norms, and GeGLU, each between two norms.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: GemmaConfig, layer: int) -> None:
        norm, eps = OffsetRMSNorm, config.rms_norm_eps if config.generation == 3 else None
        attention = grouped_query_attention(config, layer, head_norm_eps=eps, softcap=config.score_softcap, norm=norm)
        super().__init__(config, attention, geglu(config, config.intermediate_size), norm=norm)


class Gemma(DecoderModel):
    """Model Gemma, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    def __init__(self, config: GemmaConfig, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__(config, stage, GemmaBlock, norm=OffsetRMSNorm, logit_softcap=config.logit_softcap)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to embeddings [B, S, H], scaled by sqrt(H)."""
        hidden = super().embed(tokens)
        # The factor is rounded to the parameters' dtype, as when Gemma was trained: sqrt(1152) = 33.94 becomes 34 in
        # bfloat16.
        return hidden * torch.tensor(self.config.hidden_size**0.5, dtype=hidden.dtype)
