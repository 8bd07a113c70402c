"""Choice of the model that reads pretrained weights, for jobs that name no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from d9d_core.errors import JobError
from d9d_core.job_file.pretrained import find_manifest, read_config_json, stored_model
from d9d_core.plugin import ANY_MODEL_TYPE, ModelSpec
from d9d_core.registry.entries import Entry
from d9d_core.registry.registry import Registry

__all__ = ["find_model", "model_for_type"]


def find_model(location: str, registry: Registry) -> tuple[str, str]:
    """Find the model of pretrained weights: selector and reason.

    The model of a training checkpoint is named in its manifest. For a directory in Hugging Face layout, a record that
    lists the ``model_type`` of its ``config.json`` takes precedence over a record that reads any type.

    Args:
        location: a directory in Hugging Face layout, a run, a checkpoint, or an address.
        registry: registry with the records of models.

    Raises:
        CheckpointError: the location has no readable ``config.json`` or manifest.
        JobError: ``config.json`` has no ``model_type``, or not exactly one installed model reads this type.
    """
    manifest = find_manifest(location)
    if manifest is not None:
        return str(stored_model(manifest).get("name")), "its checkpoint names it"
    return model_for_type(read_config_json(location), registry)


def model_for_type(config_json: Mapping[str, Any], registry: Registry) -> tuple[str, str]:
    """Find the model that reads a ``config.json``: selector and reason; see :func:`find_model`.

    Raises:
        JobError: it has no ``model_type``, or not exactly one installed model reads this type.
    """
    model_type = config_json.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise JobError("the model's config.json states no model_type; name the model in model.name")
    entries = [entry for entry in registry.entries("model") if _types(entry)]
    readers = [entry for entry in entries if model_type in _types(entry)]
    readers = readers or [entry for entry in entries if ANY_MODEL_TYPE in _types(entry)]
    if len(readers) > 1:
        listed = " and ".join(str(entry) for entry in readers)
        raise JobError(f"the models {listed} read model_type {model_type[:80]!r}; choose one in model.name")
    if not readers:
        raise JobError(_none_reads(model_type[:80], entries, registry))
    (entry,) = readers
    return entry.spec.key, f"model_type is {model_type!r}"


def _types(entry: Entry) -> frozenset[str]:
    spec = entry.spec
    return frozenset(spec.model_types) if isinstance(spec, ModelSpec) and spec.hugging_face is not None else frozenset()


def _none_reads(model_type: str, entries: Sequence[Entry], registry: Registry) -> str:
    supported = sorted({name for entry in entries for name in _types(entry)})
    text = f"no installed model reads model_type {model_type!r}"
    homes = registry.known_homes("model type")
    if home := homes.get(model_type) or homes.get(ANY_MODEL_TYPE):
        text += f"; a model of {home} does: pip install {home}"
    return f"{text}; installed models read: {', '.join(supported) or 'no published model'}"
