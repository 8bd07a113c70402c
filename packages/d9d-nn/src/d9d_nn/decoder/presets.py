"""Presets: published sizes of a family of models, which fill fields of its config. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.config import closest

Presets = Mapping[str, Mapping[str, Any]]

#: Sizes of models that run in milliseconds on a CPU, with grouped-query attention.
TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_positions": 64,
}  # fmt: skip


def sizes(hidden: int, intermediate: int, layers: int, heads: int, pairs: int, **more: Any) -> dict[str, Any]:
    """Fields of a preset: the sizes of a model under the names of config fields, and the further fields given."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        **more,
    }


def fill(values: Mapping[str, Any], presets: Presets) -> Mapping[str, Any]:
    """Fill the fields that are not given from their ``preset``.

    Raises:
        ValueError: there is no such preset, or ``pretrained`` weights define the sizes.
    """
    name = values.get("preset")
    if not isinstance(name, str):
        return values  # validation of the field preset rejects other types
    if values.get("pretrained") is not None:
        raise ValueError(f"pretrained defines the sizes; remove preset: {name}")
    if name not in presets:
        near = closest(name, presets)
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(f"there is no preset {name!r}; {hint}presets: {', '.join(presets)}")
    return {**presets[name], **values}


def sizes_or_preset(schema: dict[str, Any]) -> None:
    """Accept ``preset`` or ``pretrained`` instead of the required fields in a config's JSON schema."""
    sizes = schema.pop("required", [])
    sources = [name for name in ("preset", "pretrained") if name in schema["properties"]]
    schema["anyOf"] = [*({"required": [name]} for name in sources), {"required": sizes}]
