"""Hugging Face format of dense Qwen3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_nn.decoder.config_json import late_windows, late_windows_json
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import ATTENTION, HEAD_NORMS, SWIGLU, Family

from d9d_qwen3.config import Qwen3Config


class Qwen3HuggingFace(DecoderFormat[Qwen3Config]):
    """Hugging Face format of dense Qwen3: ``Qwen3ForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("qwen3", "Qwen3", ATTENTION | HEAD_NORMS | SWIGLU)
    config = Qwen3Config

    def special_json(self, config: Qwen3Config) -> dict[str, Any]:
        """Write the size of feed-forward layers, biases, and which layers use the window."""
        return {
            "intermediate_size": config.intermediate_size,
            "attention_bias": config.attention_bias,
            **late_windows_json(config),
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`; ``layer_types`` may be absent."""
        window, first = late_windows(data, self.family)
        return {
            "intermediate_size": data["intermediate_size"],
            "attention_bias": bool(data.get("attention_bias")),
            "head_dim": data["head_dim"],
            "sliding_window": window,
            "sliding_from_layer": first,
        }
