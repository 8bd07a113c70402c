"""Qwen3, dense or with experts, whole or as one pipeline stage."""

from __future__ import annotations

from d9d_core.model import Stage
from d9d_nn.decoder.model import DecoderModel

from d9d_qwen3.block import build_block
from d9d_qwen3.moe_config import AnyQwen3Config


class Qwen3(DecoderModel):
    """Qwen3, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    config: AnyQwen3Config

    def __init__(self, config: AnyQwen3Config, stage: Stage = Stage(), *, heads: bool = True) -> None:  # noqa: B008
        super().__init__(config, stage, build_block, heads=heads)
