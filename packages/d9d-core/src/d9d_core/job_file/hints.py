"""Hints for refused fields and values of a job file: words of other tools, and fields of other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from d9d_core.config import Location, PluginConfig, Section, dotted
from d9d_core.errors import D9dError
from d9d_core.job_file.fields import sections_of
from d9d_core.job_file.inner import kind_in
from d9d_core.job_file.lookup import load_config
from d9d_core.registry.registry import Registry
from d9d_core.words import find

#: Largest number of places that a hint lists; if a field is in more sections, there is no hint.
_PLACES = 3


def field_hint(
    location: Location, job: type[Section], values: Mapping[str, Any], registry: Registry | None
) -> str | None:
    """Hint for an unknown field, from words of other tools or other sections of the job; ``None`` if they give none.

    Args:
        location: location of the field.
        job: class of the job file.
        values: values of the job file.
        registry: records of the components that the job file can name.
    """
    names = [part for part in location if isinstance(part, str)]
    if not names:
        return None
    word = names[-1]
    sections = [f"field of {name}" for name in (*names[-2:-1], *names[:1]) if len(names) > 1]
    if row := find(word, sections):
        return row.hint(word).replace("parallel[]", dotted(location[:-1]))
    if len(location) > 1 and _is_plain(word, job):
        return f"it belongs to the top level of the job file: {word}"
    # In a section, a field name without underscore gets no hint about other sections, where it has another meaning.
    is_elsewhere = len(location) == 1 or (len(location) == 2 and "_" in word)
    places = list(_places(word, job, values, registry)) if is_elsewhere else []
    if not 0 < len(places) <= _PLACES:
        return None
    sections = [place.rpartition(".")[0] for place in places]
    return f"it belongs to {' or '.join(sections)}: {' or '.join(places)}"


def value_hint(location: Location, value: Any) -> str | None:
    """Hint for a refused value of a field; ``None`` if there is none."""
    field = dotted([part for part in location if isinstance(part, str)])
    if not isinstance(value, str | int | float):
        return None
    row = find(value, [f"value of {field}"])
    return row.hint(value) if row else None


def _is_plain(name: str, job: type[Section]) -> bool:
    """Whether the job file itself has a field of this name, which is neither a section nor a component."""
    field = job.model_fields.get(name)
    return field is not None and not (
        list(sections_of(field.annotation)) or kind_in((*field.metadata, field.annotation))
    )


def _places(word: str, job: type[Section], values: Mapping[str, Any], registry: Registry | None) -> Iterator[str]:
    """Fields of this name in the sections of a job file and in its components; nested sections are left out."""
    for name, field in job.model_fields.items():
        inside = [section for path, section in sections_of(field.annotation) if not path]
        yield from (f"{name}.{word}" for section in inside if word in section.model_fields)
    if registry is None or word == "name":
        return
    for name, field in job.model_fields.items():
        kind = kind_in((*field.metadata, field.annotation))
        given = values.get(name)
        for index, part in enumerate(given if isinstance(given, list) else [given]):
            config = _config(kind, part, registry) if kind else None
            if config is not None and word in config.model_fields:
                yield f"{name}[{index}].{word}" if isinstance(given, list) else f"{name}.{word}"


def _config(kind: str, part: Any, registry: Registry) -> type[PluginConfig] | None:
    """Config class of a component of the job file; ``None`` if ``part`` names none or the class does not load."""
    name = part.get("name") if isinstance(part, Mapping) else part
    try:
        return load_config(registry.find(kind, name)) if isinstance(name, str) else None
    except D9dError:  # the message about this component says so
        return None
