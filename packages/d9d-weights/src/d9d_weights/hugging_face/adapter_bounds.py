"""Check of an untrusted ``adapter_config.json`` before its fields are passed to the library ``peft``.

The library compiles texts of the file as regular expressions, copies the layers that the file names, and allocates
adapters of the rank that the file gives. Values are therefore bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.errors import CheckpointError

#: Limits: rank of an adapter, number of names in a list, and characters of a name.
_MAX_RANK, _MAX_NAMES, _MAX_NAME = 1 << 14, 1 << 14, 256
_NAME = re.compile(r"[\w.-]+")
#: Regular expressions with at most two ``.*`` and no other repetition, so that matching is fast.
_PLAIN_EXPRESSION = re.compile(r"[\w.^$|()\\-]*(?:\.\*[\w.^$|()\\-]*){0,2}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_NAME and _NAME.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 4096)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MAX_RANK


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e6


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(_is_name, value)))


def is_fast_expression(value: Any) -> bool:
    """Whether a value is the text of a regular expression that is fast to match."""
    is_plain = isinstance(value, str) and len(value) <= _MAX_NAME and _PLAIN_EXPRESSION.fullmatch(value) is not None
    return is_plain and ")*" not in value


def _are_modules(value: Any) -> bool:
    """Whether a value is a list of names, or one regular expression that is fast to match."""
    return is_fast_expression(value) or _are_names(value)


def _are_layers(value: Any) -> bool:
    layers = [value] if type(value) is int else value
    sound = isinstance(layers, list) and len(layers) <= _MAX_NAMES
    return value is None or (sound and all(type(one) is int and 0 <= one < 1 << 20 for one in layers))


def _are_patterns(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def sound(value: Any) -> bool:
        if value is None:
            return True
        fits = isinstance(value, dict) and len(value) <= _MAX_NAMES
        return fits and all(_are_modules(name) and is_value(item) for name, item in value.items())

    return sound


#: Field -> function that returns whether a value is in bounds; for all adapters, for LoRA, and for (IA)3.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("task_type", "revision", "base_model_name_or_path", "peft_version"), _is_text),
    "peft_type": lambda value: value in ("LORA", "IA3"),
    **dict.fromkeys(("inference_mode", "fan_in_fan_out", "use_dora", "use_rslora", "lora_bias"), _is_flag),
    **dict.fromkeys(("target_modules", "exclude_modules", "feedforward_modules"), _are_modules),
    **dict.fromkeys(("modules_to_save", "target_parameters"), _are_names),
    "layers_pattern": lambda value: _is_name(value) or _are_names(value) or value == "",
    "layers_to_transform": _are_layers,
    "r": _is_rank,
    "lora_alpha": _is_number,
    "lora_dropout": _is_share,
    "bias": lambda value: value in ("none", "all", "lora_only"),
    "init_lora_weights": lambda value: _is_flag(value) or value in ("gaussian", "orthogonal"),
    "init_ia3_weights": _is_flag,
    "rank_pattern": _are_patterns(_is_rank),
    "alpha_pattern": _are_patterns(_is_number),
}
#: Fields without effect here: ``_DROPPED`` with any value, ``_UNUSED`` only with peft's default value.
_DROPPED = frozenset({"auto_mapping"})  # it names classes of the model, which is already known
_UNUSED = {"megatron_core": "megatron.core", "qalora_group_size": 16}


def bounded_fields(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Check each field of an ``adapter_config.json``, and return the fields that have an effect.

    Args:
        values: contents of the file.
        name: name of the file in messages.

    Raises:
        CheckpointError: a field is unknown and not empty, a value is out of bounds, or ``peft_type`` is absent.
    """
    found = {}
    for field, value in values.items():
        check = _FIELDS.get(field)
        if check is None:
            if field in _DROPPED or value in (None, False, 0, "", [], {}) or _UNUSED.get(field) == value:
                continue
            raise CheckpointError(
                f"{name}: the field {field[:80]!r} is set to {_short(value)}, and d9d does not know its effect; set it "
                "to null if the adapter does not need it"
            )
        if not check(value):
            raise CheckpointError(
                f"{name}: {field} is {_short(value)}, which is out of bounds or of a wrong type; correct it"
            )
        found[field] = value
    if "peft_type" not in found:
        raise CheckpointError(f"{name} has no field peft_type; set it to LORA or IA3")
    return found


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
