"""The published sizes of Qwen3 dense, as in their ``config.json``.

Source: Qwen team 2025, "Qwen3 Technical Report", table 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.config.base import closest

_COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "max_positions": 40_960,
}


def _size(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Mapping[str, Any]:
    return _COMMON | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_attention_heads": heads,
        "tie_embeddings": tied,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "0.6b": _size(1024, 3072, 28, 16, tied=True),
    "1.7b": _size(2048, 6144, 28, 16, tied=True),
    "4b": _size(2560, 9728, 36, 32, tied=True),
    "8b": _size(4096, 12288, 36, 32, tied=False),
    "14b": _size(5120, 17408, 40, 40, tied=False),
    "32b": _size(5120, 25600, 64, 64, tied=False),
}


def fill(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields given, and those of their ``preset`` that are not.

    Raises:
        ValueError: there is no such preset, or the sizes are those of ``pretrained`` weights.
    """
    name = values.get("preset")
    if not isinstance(name, str):
        return values  # what else stands there is the field's to refuse
    if values.get("pretrained") is not None:
        raise ValueError(f"the sizes are those of pretrained; remove preset: {name}")
    if name not in PRESETS:
        near = closest(name, PRESETS)
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(f"there is no preset {name!r}; {hint}presets: {', '.join(PRESETS)}")
    return {**PRESETS[name], **values}


def sizes_or_preset(schema: dict[str, Any]) -> None:
    """In a config's JSON schema, let ``preset`` (or ``pretrained``) stand for the fields required without it."""
    sizes = schema.pop("required", [])
    sources = [name for name in ("preset", "pretrained") if name in schema["properties"]]
    schema["anyOf"] = [*({"required": [name]} for name in sources), {"required": sizes}]
