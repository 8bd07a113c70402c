"""Publishable part of a job: the settings that made a model, without machines, paths and addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from d9d_core.job_file.job import JobConfig
from pydantic import BaseModel

#: Sections and fields about where and how a job ran, which do not affect the model. They are left out, because exports
#: are compared between layouts, and destinations of logged values may contain addresses and keys.
_OF_THE_RUN = frozenset(
    {
        "run", "device", "mesh", "parallel", "pipeline", "kernels", "metrics", "trackers", "subscribers", "logging",
        "checkpoint", "timeouts", "export", "plugins", "batch.microbatch", "gradients.bucket_mib", "loading.threads",
        "loading.read",
    }
)  # fmt: skip
_WINDOWS = re.compile(r"[A-Za-z]:\\|\\\\")
#: Texts with a slash that are not paths: templates, and sentences.
_TEMPLATE = re.compile(r"\n|\{\{|\{%|\{#")
_SENTENCE = re.compile(r"\s")
#: Names of directories in a run; the run's own name is more informative.
_FOLDERS = re.compile(r"model|adapter|checkpoints|step-\d+")


def changed_fields(job: JobConfig) -> dict[str, Any]:
    """Fields of a job that differ from their defaults, and the names of its components."""
    changed: dict[str, Any] = _changed(job, job.resolved())
    return changed


def public_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job that affected the model, with paths cut to their last component.

    Args:
        job: fields of the job, as JSON values; the job stored in a checkpoint may have any values.
    """
    values = {name: value for name, value in job.items() if name not in _OF_THE_RUN}
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {field: item for field, item in value.items() if f"{name}.{field}" not in _OF_THE_RUN}
    found: dict[str, Any] = without_paths(
        {name: value for name, value in values.items() if value not in (None, {}, [])}
    )
    return found


def without_paths(value: Any) -> Any:
    """Cut each path and address in a value to its last component, so that no directory, user or host is published."""
    if isinstance(value, str):
        return last_component(value)
    if isinstance(value, Mapping):
        return {last_component(str(name)): without_paths(item) for name, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list | tuple) else value


def last_component(text: str) -> str:
    """Cut a path or address to its last component; replace a template or sentence that has a slash by its length."""
    is_address = "://" in text
    if not is_address and "/" not in text and not _WINDOWS.match(text):
        return text
    starts_as_path = is_address or text.startswith(("/", "./", "../", "~"))
    if _TEMPLATE.search(text) or (_SENTENCE.search(text) and not starts_as_path):
        return f"(text of {len(text):,} characters)"
    if is_address:
        text = re.split(r"[?#]", text)[0]  # the query of an address may be a signature
        scheme, _, rest = text.rpartition("://")
        name = rest.rstrip("/").rpartition("/")[2] if "/" in rest.strip("/") else ""
        # an address without a path is only a host or bucket, which is not published
        return name or f"{scheme.rpartition(':')[2]}://..."
    return _components(text)[-1]


def base_name(location: str) -> str | None:
    """Name of pretrained weights: for an export or checkpoint of a run, the run's name.

    ``None`` if there is no name.
    """
    parts = _components(re.split(r"[?#]", location)[0] if "://" in location else location)
    while len(parts) > 1 and _FOLDERS.fullmatch(parts[-1]):
        parts.pop()
    if "://" in location and len(parts) < 3:
        return None
    return None if parts[-1] in {"", ".", "..", "/"} else parts[-1]


def _components(path: str) -> list[str]:
    separators = r"[\\/]+" if _WINDOWS.match(path) else "/+"
    return [part for part in re.split(separators, path) if part] or ["/"]


def _changed(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel) and isinstance(dumped, Mapping):
        return {
            name: _changed(getattr(value, name), item)
            for name, item in dumped.items()
            if not _is_default(type(value), name, getattr(value, name))
        }
    if isinstance(value, Mapping) and isinstance(dumped, Mapping):
        return {name: _changed(value.get(name), item) for name, item in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list) and len(value) == len(dumped):
        return [_changed(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


def _is_default(model: type[BaseModel], name: str, value: Any) -> bool:
    field = model.model_fields[name]
    selects = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1  # 'name', 'kind'
    return not selects and not field.is_required() and field.default_factory is None and bool(value == field.default)
