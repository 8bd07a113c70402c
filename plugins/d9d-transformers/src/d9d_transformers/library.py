"""Access to transformers: configs and models on the meta device; only this module handles differences of releases."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from d9d_core.errors import BuildError, CheckpointError
from d9d_weights.hugging_face.fields import HARMLESS

if TYPE_CHECKING:
    from torch import nn

#: Name under which transformers finds d9d's attention.
ATTENTION = "d9d"
#: Names of attention functions that record how a model calls them: without masks, and with the model's masks.
EXAMINED, MASKED = "d9d_examined", "d9d_masked"
#: Auto classes that find models with a language model inside, in order of search; releases have different ones.
_CONTAINERS = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM")
#: Fields of a larger model's config that also hold for the language model inside it.
_OF_FILES = ("quantization_config", "is_encoder_decoder")
#: Name of an attention function that mixes no tokens: it returns the value of each position.
OWN_VALUE = "d9d_own_value"


def library() -> Any:
    """Import transformers.

    Raises:
        BuildError: transformers cannot be imported.
    """
    try:
        import transformers
    except ImportError as error:
        text = f"model 'transformers' needs the library transformers, which cannot be imported: {error}"
        raise BuildError(f"{text}; install it with: pip install 'transformers>=5.17'") from error
    return transformers


def native_config(values: Mapping[str, Any]) -> Any:
    """Config object of transformers for the contents of a ``config.json``; no code of a model directory runs.

    Raises:
        CheckpointError: the installed release has no such type, or refuses a value; or a field looks misspelled.
    """
    transformers = library()
    kind = values["model_type"]
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        stored = " (its code is next to the weights, and d9d never runs it)" if "auto_map" in values else ""
        raise CheckpointError(
            f"config.json: transformers {transformers.__version__} has no model_type {kind!r}{stored}; install a "
            "release that has it"
        )
    given = {name: _numbers(value) for name, value in values.items() if name != "auto_map"}
    try:
        config = known[kind].from_dict(given)
    except Exception as error:  # validators of configs raise exceptions of several libraries
        raise CheckpointError(f"config.json: transformers refuses it for {kind}: {error}") from error
    for name in unknown_fields(config, given):
        if meant := get_close_matches(name, _declared(config) - given.keys(), n=1, cutoff=0.85):
            raise CheckpointError(
                f"config.json: {name} is no field of {kind}, which has {meant[0]}; correct its name, or remove it"
            )
    return config


def unknown_fields(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Fields of a ``config.json`` about the model that transformers stores in a config object, but does not declare."""
    known = _declared(config).union(("model_type",), *HARMLESS.values())
    stored = vars(config)
    return [name for name, value in values.items() if value is not None and name in stored and name not in known]


def written_by_newer(values: Mapping[str, Any]) -> str | None:
    """Release of transformers that wrote a ``config.json``, if it is newer than the installed one; else ``None``."""
    written, installed = (_release(text) for text in (values.get("transformers_version"), library().__version__))
    return str(values["transformers_version"]) if written > installed else None


def _release(text: Any) -> tuple[int, ...]:
    """Major and minor version; no numbers for other values."""
    parts = re.match(r"(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return tuple(map(int, parts.groups())) if parts else ()


def _declared(config: Any) -> frozenset[str]:
    """Names of the fields of a config object's class, including other names of a field."""
    return frozenset(vars(type(config).from_dict({}))).union(getattr(config, "attribute_map", ()))


def activations() -> frozenset[str]:
    """Names of the activation functions of transformers."""
    return frozenset(importlib.import_module("transformers.activations").ACT2FN)


def language_fields(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Config fields of the language model inside the larger model of a ``config.json``; ``None`` if it has none.

    Raises:
        CheckpointError: the installed release has no such type, or refuses a value.
    """
    whole = native_config(values)
    inside = whole.get_text_config()
    name = next((name for name in getattr(whole, "sub_configs", {}) if getattr(whole, name, None) is inside), None)
    kinds = library().AutoModelForCausalLM._model_mapping  # noqa: SLF001 - no public look-up; a test reads it
    if name is None or type(inside) not in kinds:
        return None
    given = values.get(name)
    fields = {**(given if isinstance(given, Mapping) else {}), "model_type": inside.model_type}
    # Configs of larger models change fields of the inner one, such as whether its attention is causal.
    alone = native_config(fields).to_dict()
    changed = {field: value for field, value in inside.to_dict().items() if alone.get(field, value) != value}
    return {
        **fields,
        **changed,
        **{field: values[field] for field in _OF_FILES if field in values},
        "architectures": [kinds[type(inside)].__name__],
        "tie_word_embeddings": bool(getattr(whole, "tie_word_embeddings", inside.tie_word_embeddings)),
    }


def _numbers(value: Any) -> Any:
    """Convert objects that transformers writes for infinity and NaN, which JSON lacks, to numbers."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _numbers(one) for name, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def native_model(config: Any, attention: str = ATTENTION) -> Any:
    """Language model of transformers for a config, on the current device, in the default dtype.

    Args:
        config: config object of transformers.
        attention: registered name of its attention.

    Raises:
        BuildError: transformers has no language model of this type, or cannot build it.
    """
    transformers = library()
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - no public look-up; a test reads it
        raise BuildError(
            f"model.config: transformers has no language model (ForCausalLM) of type {config.model_type!r}; choose "
            "another type"
        )
    return _built(transformers.AutoModelForCausalLM, config, attention)


def container_model(config: Any) -> Any:
    """Model of transformers that contains a language model and other parts, such as a model of images and text.

    Args:
        config: config object of transformers.

    Raises:
        BuildError: transformers has no such model, or cannot build it.
    """
    transformers = library()
    found = [getattr(transformers, name, None) for name in _CONTAINERS]
    for kind in (kind for kind in found if kind is not None and type(config) in kind._model_mapping):  # noqa: SLF001 - as above
        return _built(kind, config, ATTENTION)
    raise BuildError(f"model.config: transformers has no model of type {config.model_type!r}; correct model_type")


def _built(kind: Any, config: Any, attention: str) -> Any:
    import torch

    try:
        return kind.from_config(
            config, attn_implementation=attention, dtype=torch.get_default_dtype(), trust_remote_code=False
        )
    except Exception as error:  # constructors of models raise anything
        raise BuildError(f"model.config: transformers cannot build a {config.model_type}: {error}") from error


def base_of(model: Any) -> tuple[str, nn.Module]:
    """Name and module of the base of a language model, which returns hidden states.

    Raises:
        BuildError: the model has no such module.
    """
    name = model.base_model_prefix
    base = getattr(model, name, None)
    if base is None:
        raise BuildError(
            f"model.config: {type(model).__name__} has no module {name!r} that returns hidden states, so d9d cannot "
            "train it"
        )
    return name, base


def conversions(model: Any) -> list[Any]:
    """Conversions from the tensors in a model's files to its parameters, in order, by transformers' own mapping."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    found: list[Any] = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return found
