"""Model sizes from the ``config.json`` of pretrained weights, for fields that the job file leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d9d_core.config import ModelConfig, Section
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import CheckpointError, D9dError, JobError, PluginError
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ANY_MODEL_TYPE, ModelSpec
from d9d_core.registry.entries import Entry, plugin_error
from d9d_core.untrusted import MAX_JSON_BYTES, Place, parse_json, read_regular

#: Name of a model on the Hugging Face Hub.
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
#: Name of the manifest, the last file that a save writes into a training checkpoint.
_MANIFEST = "manifest.json"


def with_stored_sizes(entry: Entry, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model with ``pretrained``: the job file's fields, completed by the fields of the stored model.

    A section that the job file gives in part is completed by the stored section.

    Args:
        entry: record of the model.
        fields: fields in the job file, with ``pretrained``.

    Raises:
        JobError: the model cannot start from pretrained weights, or its stored config cannot be read or belongs to
            another model.
        PluginError: the model's Hugging Face format cannot be loaded, or raises an unexpected exception.
    """
    spec = entry.spec
    config = load_config(entry)
    if not issubclass(config, ModelConfig) or not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise JobError(
            f"model {entry} cannot start from pretrained weights: it has no Hugging Face layout, or its config is not "
            "a ModelConfig; remove model.pretrained"
        )
    try:
        layout = spec.hugging_face.load()()
    except FOREIGN_FAILURES as error:
        text = f"model {entry}: its Hugging Face format {spec.hugging_face} failed to load: {error!r}"
        raise plugin_error(text, error) from error
    location = str(fields["pretrained"])
    try:
        manifest = find_manifest(location)
        if manifest is not None:
            return _completed(config, _sizes_of_checkpoint(spec.key, manifest), fields)
        data = read_config_json(location)
        _check_model_type(entry, spec, data.get("model_type"))
        stored = layout.config_from_json(data)
    except PluginError:
        raise
    except D9dError as error:
        raise JobError(f"pretrained: {location}: {error}") from error
    except FOREIGN_FAILURES as error:
        text = f"model {entry}: its Hugging Face format failed to read the config.json of {location}: {error!r}"
        raise plugin_error(text, error) from error
    return _completed(config, stored.model_dump(), fields)


def _completed(config: type[ModelConfig], stored: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Stored fields, updated by the job file's fields. A nested section of a fixed type is updated field by field."""
    found = {**stored, **fields}
    for name, field in config.model_fields.items():
        parts = stored.get(name), fields.get(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            before, given = parts
            if isinstance(before, Mapping) and isinstance(given, Mapping):
                found[name] = {**before, **given}
    return found


def _check_model_type(entry: Entry, spec: ModelSpec, model_type: object) -> None:
    if spec.model_types and not spec.model_types & {model_type, ANY_MODEL_TYPE}:
        text = f"model_type in its config.json is {repr(model_type)[:80]}, which model {entry} does not read"
        raise CheckpointError(f"{text}; remove model.name, so that d9d uses the installed model that reads it")


def find_manifest(location: str) -> Path | None:
    """Manifest of a local training checkpoint, or of the newest checkpoint of a run; ``None`` if there is none.

    Args:
        location: a checkpoint's directory, a directory of checkpoints, a run's directory, or any other location.
    """
    checkpoints = Place.of(location).checkpoints
    if checkpoints is None:
        return None
    if (checkpoints / _MANIFEST).is_file():
        return checkpoints / _MANIFEST
    return max(checkpoints.glob(f"step-*/{_MANIFEST}"), default=None)


def _sizes_of_checkpoint(name: str, manifest: Path) -> dict[str, Any]:
    """Fields of the model's config, from the manifest of a training checkpoint, without ``pretrained``."""
    stored = stored_model(manifest)
    selector = str(stored.get("name"))
    if selector.rpartition("/")[2] != name:
        raise CheckpointError(
            f"its checkpoint contains a model {selector[:80]!r}, not {name!r}; set model.name to {selector[:80]!r}"
        )
    return {field: value for field, value in stored.items() if field not in ("name", "pretrained")}


def stored_model(manifest: Path) -> dict[str, Any]:
    """Fields of the model's config, from the manifest of a training checkpoint.

    Raises:
        CheckpointError: the manifest cannot be read, or describes no model.
    """
    try:
        content = parse_json(read_regular(manifest, links="none"), strict=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{manifest} cannot be read: {error}; copy this checkpoint again, or give another in model.pretrained"
        ) from error
    job = content.get("job") if isinstance(content, dict) else None
    stored = job.get("model") if isinstance(job, dict) else None
    if not isinstance(stored, dict):
        raise CheckpointError(
            f"{manifest} does not name the checkpoint's model; give a checkpoint of d9d train in model.pretrained"
        )
    return stored


def read_config_json(location: str) -> dict[str, Any]:
    """Read the ``config.json`` of pretrained weights: in a directory, next to a weight file, or at an fsspec address.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    try:
        content = _read(location)
    except Exception as error:  # drivers of addresses raise exceptions of their client libraries
        if _ON_HUB.fullmatch(location) and not Path(location).exists():
            name = location.partition("/")[2]
            raise CheckpointError(
                f"there is no such directory; if it is a model of the Hugging Face Hub, download it: "
                f"hf download {location} --local-dir {name}, then set model.pretrained to ./{name}"
            ) from error
        reason = f"{type(error).__name__}: {error}" if "://" in location else getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"the config.json of {location} cannot be read ({reason}); give a directory in Hugging Face layout, or the "
            "directory of a run. To resume a run from its checkpoints, run its job.yaml with model.pretrained set to "
            "null"
        ) from error
    try:
        values = parse_json(content)
    except ValueError as error:
        raise CheckpointError(
            f"the config.json of {location} is not valid JSON: {error}; copy the file again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"the config.json of {location} is not a JSON object; copy the model's own file there")
    return values


def _read(location: str) -> bytes:
    name = "config.json"
    if location.endswith(".safetensors"):
        location = location.rpartition("/")[0]
    if "://" in location:
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(f"{location.rstrip('/')}/{name}", "rb") as file:
            content: bytes = file.read(MAX_JSON_BYTES + 1)
            return content
    return read_regular(Path(location, name), links="near")
