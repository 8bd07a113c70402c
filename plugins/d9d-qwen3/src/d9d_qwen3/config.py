"""Config of a dense Qwen3 model."""

from __future__ import annotations

from typing import ClassVar, Literal

from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.presets import Presets

from d9d_qwen3.presets import PRESETS


class Qwen3Config(DenseConfig):
    """Qwen3 dense (Qwen team 2025, "Qwen3 Technical Report", section 2)."""

    presets: ClassVar[Presets] = PRESETS

    name: Literal["qwen3"] = "qwen3"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 0.6b, 1.7b, 4b, 8b, 14b or 32b. Fills every field that is not given."""


def tiny() -> Qwen3Config:
    """Config of a model that runs in milliseconds on a CPU, with grouped heads and an untied head."""
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_positions=64,
    )
