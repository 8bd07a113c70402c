"""Qwen3-Next and Qwen3.5, whole or as one pipeline stage."""

from __future__ import annotations

from d9d_core.model import Stage
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.rms_norm import OffsetRMSNorm

from d9d_qwen3_next.block import build_block
from d9d_qwen3_next.config import AnyConfig


class Qwen3Next(DecoderModel):
    """Qwen3-Next or Qwen3.5, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    config: AnyConfig

    def __init__(self, config: AnyConfig, stage: Stage = Stage(), *, heads: bool = True) -> None:  # noqa: B008
        super().__init__(config, stage, build_block, heads=heads, norm=OffsetRMSNorm)
