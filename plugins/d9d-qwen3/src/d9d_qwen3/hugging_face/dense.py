"""Hugging Face format of dense Qwen3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_core.errors import CheckpointError

from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.hugging_face.config_json import Family
from d9d_qwen3.hugging_face.format import Qwen3Format


class Qwen3HuggingFace(Qwen3Format[Qwen3Config]):
    """Format of transformers' ``Qwen3ForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("qwen3", "Qwen3")
    config = Qwen3Config

    def special_json(self, config: Qwen3Config) -> dict[str, Any]:
        """Write the size of feed-forward layers, and which layers slide."""
        first = config.num_layers if config.sliding_window is None else config.sliding_from_layer
        return {
            "intermediate_size": config.intermediate_size,
            "max_window_layers": first,
            "layer_types": ["full_attention"] * first + ["sliding_attention"] * (config.num_layers - first),
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`; ``layer_types`` may be absent."""
        window, first = _window(data)
        return {
            "intermediate_size": data["intermediate_size"],
            "head_dim": data["head_dim"],
            "sliding_window": window,
            "sliding_from_layer": first,
        }


def _window(data: Mapping[str, Any]) -> tuple[int | None, int]:
    """Positions that sliding layers see, and the first such layer."""
    layers = data["num_hidden_layers"]
    # What transformers makes of it, its defaults included.
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    kinds = data.get("layer_types")
    if kinds is None:
        first = min(data.get("max_window_layers", 28), layers)
    else:
        slides = [kind == "sliding_attention" for kind in kinds]
        first = slides.index(True) if True in slides else layers
        odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if odd or len(kinds) != layers or not all(slides[first:]):
            raise CheckpointError(
                f"config.json: layer_types is {kinds}; qwen3 here has full_attention first and sliding_attention after"
            )
    if window is None or first >= layers:
        return None, 0
    return window, first
