"""Llama and GLM, whole or as one pipeline stage; Mistral and Qwen2 use the modules of Llama."""

from __future__ import annotations

from d9d_core.model import Stage
from d9d_nn.decoder.block import DecoderBlock, grouped_query_attention, swiglu
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.model import DecoderModel


class LlamaBlock(DecoderBlock):
    """Transformer block: attention without head norms, then SwiGLU.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: DenseConfig, layer: int) -> None:
        super().__init__(config, grouped_query_attention(config, layer), swiglu(config, config.intermediate_size))


class Llama(DecoderModel):
    """Llama, Mistral or Qwen2, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    def __init__(self, config: DenseConfig, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__(config, stage, LlamaBlock)


class GlmBlock(DecoderBlock):
    """Transformer block: attention in which pairs of neighbouring features rotate, then SwiGLU.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: DenseConfig, layer: int) -> None:
        attention = grouped_query_attention(config, layer, interleaved=True)
        super().__init__(config, attention, swiglu(config, config.intermediate_size))


class Glm(DecoderModel):
    """GLM, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    def __init__(self, config: DenseConfig, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__(config, stage, GlmBlock)
