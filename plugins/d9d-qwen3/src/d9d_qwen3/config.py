"""Config of dense Qwen3 models."""

from __future__ import annotations

from typing import ClassVar, Literal

from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.presets import TINY, Presets

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
    return Qwen3Config.model_validate(TINY | {"intermediate_size": 48})
