"""Check of an ``adapter_config.json`` of another author: fields with an unknown meaning are refused.

The ``peft`` library adds fields with each release, and many of them change the result although the tensors have the
same names: the initialisations PiSSA and OLoRA, for example, change the base model. The check therefore allows a list
of known fields, instead of forbidding some.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from d9d_core.errors import CheckpointError

from d9d_weights.hugging_face.adapter_bounds import is_fast_expression

__all__ = ["check_adapter_config", "module_values"]

#: Ignored fields: labels, the adapter's history, and settings of disabled features.
_UNREAD = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "lora_dropout", "init_ia3_weights", "eva_config", "megatron_core", "qalora_group_size",
})  # fmt: skip
#: Initialisations of an adapter that do not change the model's weights.
_INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
#: Fields that select modules, which are compared with the tensors.
_MODULES = frozenset({
    "target_modules", "exclude_modules", "feedforward_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
#: Name of a tensor in an adapter's file; the group is the module's published name.
_TENSOR = re.compile(r"base_model\.model\.(.+)\.(?:lora_\w+|ia3_l)(?:\.weight)?")
_OFF = (None, False, "", "none")
#: Key of a pattern that is a module's name, or the last parts of one; ``^`` marks a whole name.
_NAME = re.compile(r"\^?[\w-]+(?:\\?\.[\w-]+)*")
#: Largest number of regular expressions among the keys of a pattern; each is matched with the name of each module.
_MOST_EXPRESSIONS = 256


def check_adapter_config(
    config_json: Mapping[str, Any], names: Iterable[str], *, method: str, compared: Collection[str] = ()
) -> None:
    """Check that an adapter's config uses no feature that the method lacks, and fits the adapter's tensors.

    Args:
        config_json: contents of ``adapter_config.json``.
        names: names of the adapter's tensors.
        method: name of the method in the job file.
        compared: names of the fields that the caller compares with its own config.

    Raises:
        CheckpointError: an unknown field is set, layers are found by another name than ``layers``, or the config
            excludes a module that the adapter has tensors for.
    """
    read = _UNREAD | _MODULES | set(compared)
    unknown = {
        field: value
        for field, value in config_json.items()
        if field not in read and not _is_off(value) and not (field == "init_lora_weights" and value in _INITIALISATIONS)
    }
    if unknown:
        values = ", ".join(f"{field}={value!r}" for field, value in sorted(unknown.items()))
        advice = "merge the adapter into its base model with peft, and start from the merged model"
        raise CheckpointError(f"its config has {_short(values)}, which d9d's '{method}' does not support; {advice}")
    found = (_TENSOR.fullmatch(name) for name in names)
    _check_modules(config_json, dict.fromkeys(match[1] for match in found if match))


def module_values(
    config_json: Mapping[str, Any], field: str, modules: Iterable[str], default: float
) -> dict[str, float]:
    """Rank or alpha of each module, by ``rank_pattern`` or ``alpha_pattern``, as the ``peft`` library finds it.

    A module gets the value of the first key that, as a regular expression, matches the module's whole name or the end
    of its name after a dot.

    Args:
        config_json: contents of ``adapter_config.json``.
        field: name of the pattern's field.
        modules: published names of the modules.
        default: value of the modules that no key matches.

    Raises:
        CheckpointError: the field's value is no mapping from expressions to numbers, or contains too many expressions,
            or expressions that are malformed or slow to match.
    """
    values = config_json.get(field) or {}
    if not isinstance(values, dict) or not all(type(value) in (int, float) for value in values.values()):
        raise CheckpointError(
            f"its config has {_short(f'{field}={values!r}')}, which is no mapping from names to numbers"
        )
    numbers, names = list(values.values()), dict[str, int]()
    expressions: list[tuple[int, re.Pattern[str]]] = []
    for place, key in enumerate(values):
        if _NAME.fullmatch(key):
            names.setdefault(key.replace("\\", ""), place)
        else:
            expressions.append((place, _expression(field, key)))
    if len(expressions) > _MOST_EXPRESSIONS:
        raise CheckpointError(
            f"its config has {len(expressions)} regular expressions in {field}, which are slow to match; replace "
            "them by names of modules"
        )
    found = {}
    for module in modules:
        ends = [module[place + 1 :] for place, character in enumerate(module) if character == "."]
        places = [names[name] for name in (f"^{module}", module, *ends) if name in names]
        places += [place for place, expression in expressions if expression.match(module)]
        found[module] = numbers[min(places)] if places else default
    return found


def _expression(field: str, key: str) -> re.Pattern[str]:
    try:
        if is_fast_expression(key):
            return re.compile(rf"(.*\.)?({key})$")
    except re.error:
        pass
    raise CheckpointError(
        f"its config has the key {_short(repr(key))} in {field}, a regular expression that is malformed or slow to "
        "match; replace it by names of modules"
    )


def _check_modules(data: Mapping[str, Any], modules: Iterable[str]) -> None:
    # Regular expressions are not compared: tensors show the adapted modules, and matching a malicious expression may
    # never end.
    targets, excluded = data.get("target_modules"), data.get("exclude_modules")
    layers, pattern = data.get("layers_to_transform"), data.get("layers_pattern")
    if layers is not None and pattern not in (None, [], "", "layers", ["layers"]):
        raise CheckpointError(
            f"its config has layers_pattern={pattern!r}, but d9d finds layers by the name 'layers' only; remove it"
        )
    numbers = None if layers is None else layers if isinstance(layers, list) else [layers]
    for module in modules:
        left_out = (
            (isinstance(targets, list) and not _names(targets, module))
            or (isinstance(excluded, list) and _names(excluded, module))
            or (numbers is not None and _layer(module) not in numbers)
        )
        if left_out:
            fields = ("target_modules", "exclude_modules", "layers_to_transform")
            values = ", ".join(f"{field}={data[field]!r}" for field in fields if data.get(field) is not None)
            raise CheckpointError(
                f"the adapter has tensors for '{module}', which its config excludes ({_short(values)}); correct the "
                "config or remove the tensors"
            )


def _is_off(value: Any) -> bool:
    return value in _OFF if isinstance(value, str | bool | None) else value in ([], {})


def _names(names: Sequence[Any], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(module: str) -> int | None:
    parts = module.split(".")
    for before, number in itertools.pairwise(parts):
        if before == "layers" and number.isdecimal():
            return int(number)
    return None


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
