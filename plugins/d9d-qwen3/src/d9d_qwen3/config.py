"""Config of a dense Qwen3 model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from d9d_qwen3.base_config import Qwen3Base
from d9d_qwen3.presets import PRESETS, Presets


class Qwen3Config(Qwen3Base):
    """Qwen3 dense (Qwen team 2025, "Qwen3 Technical Report", section 2)."""

    presets: ClassVar[Presets] = PRESETS

    name: Literal["qwen3"] = "qwen3"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 0.6b, 1.7b, 4b, 8b, 14b or 32b. Fills every field that is not given."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    sliding_from_layer: int = Field(default=0, ge=0)
    """The first layer that slides; earlier ones see all. Hugging Face: ``max_window_layers``."""

    @field_validator("sliding_from_layer")
    @classmethod
    def _some_layer_slides(cls, value: int, info: ValidationInfo) -> int:
        layers, given = info.data.get("num_layers"), "sliding_window" in info.data
        if given and info.data["sliding_window"] is None and value:
            raise ValueError(f"{value} has no effect without sliding_window; give a window, or remove this field")
        if layers is not None and value >= layers:
            raise ValueError(f"{value} leaves no layer of {layers} that slides; remove sliding_window and this field")
        return value

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer sees; ``None`` for all."""
        return self.sliding_window if layer >= self.sliding_from_layer else None


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
