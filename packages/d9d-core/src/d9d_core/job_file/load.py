"""Validation of a job file; reports all problems at once, each with its line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from d9d_core.config import Location, dotted
from d9d_core.errors import JobError
from d9d_core.job_file.document import Document, after_place
from d9d_core.job_file.hints import field_hint, value_hint
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.sections.plugins import Plugins
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

_TO_JOB = "to the job file"
#: Suffix of a job file -> form of a field's name in it; files with other suffixes are YAML.
_WRITTEN = {".json": '"{}":', ".toml": "{} ="}
#: Pattern that some names must match -> its description in an error.
_NAMES = {
    r"^\w[\w.-]*$": "a name has letters, digits and _, and after the first character also - and .",
    "^[a-z][a-z0-9_]*$": "a name has small letters, and after the first character also digits and _",
}
_MAPPING = "a mapping of fields"
#: Largest number of problems of a job that are printed; further problems are only counted.
_SHOWN = 50
_LONG = 200
Config = TypeVar("Config", bound=BaseJob)


def plugin_policy(document: Document, extra: PluginPolicy | None = None) -> PluginPolicy:
    """Plugin policy from the job file, the environment and the command line.

    Raises:
        JobError: the section ``plugins`` is malformed, or one of its files is absent.
    """
    try:
        section = Plugins.model_validate(_values(document).get("plugins") or {})
    except ValidationError as error:
        raise _job_error(error, document, ("plugins",)) from None
    for index, file in enumerate(section.files):
        if not _is_file(file):
            location = (
                ("plugins", index) if isinstance(document.values["plugins"], list) else ("plugins", "files", index)
            )
            raise JobError(f"{document.where(location)}: {dotted(location)}: there is no file {_short(str(file))}")
    return section.policy() | PluginPolicy.from_environment(os.environ) | (extra or PluginPolicy())


def registry_for(document: Document, extra: PluginPolicy | None = None) -> Registry:
    """Registry of the plugins that the job's policy allows."""
    return discover(plugin_policy(document, extra))


def validate_job(config_class: type[Config], document: Document, registry: Registry) -> Config:
    """Resolve names and check every value.

    Raises:
        JobError: one line per problem: ``file:line: location: cause; suggestion``.
    """
    context: dict[str, Any] = {"registry": registry, "origins": []}
    try:
        return config_class.model_validate(_values(document), context=context)
    except ValidationError as error:
        job_error = _job_error(error, document, job=config_class, registry=registry)
        job_error.origin = next((origin for origin in context["origins"] if origin is not None), None)
        raise job_error from job_error.origin


def _values(document: Document) -> dict[str, Any]:
    """Values of the document, with absolute paths of plugin files instead of paths relative to the job file.

    The resolved job, saved in the run's directory, must find the files too.
    """
    section = document.values.get("plugins")
    files = section.get("files") if isinstance(section, dict) else section
    if not isinstance(files, list):
        return document.values
    directory = Path(document.source).absolute().parent
    absolute = [os.path.normpath(directory / file) if isinstance(file, str) else file for file in files]
    return {**document.values, "plugins": {**section, "files": absolute} if isinstance(section, dict) else absolute}


def _job_error(
    error: ValidationError,
    document: Document,
    prefix: Location = (),
    job: type[BaseJob] = JobConfig,
    registry: Registry | None = None,
) -> JobError:
    problems = error.errors()
    lines = [_line(line, document, prefix, job, registry) for line in problems[:_SHOWN]]
    more = [f"and {len(problems) - _SHOWN} more problems"] if len(problems) > _SHOWN else []
    return JobError("\n".join([*lines, *more]))


def _line(
    line: Mapping[str, Any], document: Document, prefix: Location, job: type[BaseJob], registry: Registry | None
) -> str:
    loc = (*prefix, *line["loc"])
    around = loc[:-1] if line["type"] == "missing" else loc  # the last part of a missing location is a field's name
    location = (*_location_in_file(around, document.values), *loc[len(around) :])
    text = str(line["msg"]).removeprefix("Value error, ")
    if line["type"] == "missing":
        field = _WRITTEN.get(Path(document.source).suffix.lower(), "{}:").format(location[-1])
        text = f"missing; add '{field}' " + (f"under '{dotted(location[:-1])}'" if location[1:] else _TO_JOB)
    elif line["type"] == "unknown_field":
        if hint := field_hint(location, job, document.values, registry):
            text = f"{text.partition('; ')[0]}; {hint}"
    elif line["type"] == "union_tag_not_found":
        text = f"{text.rpartition(' ')[2]}, which selects the fields, is missing, got {_short(repr(line['input']))}"
    elif line["type"] not in ("plugin", "not_named", "no_registry", "value_error"):
        # Job files have lists, which configs read as tuples.
        text = text.replace("a valid tuple", "a list").replace("Tuple should", "List should")
        text = re.sub("a valid dictionary or (object to extract fields from|instance of [A-Za-z]+)", _MAPPING, text)
        text = _NAMES.get(text.removeprefix("String should match pattern ").strip("'"), text)
        text = f"{text[0].lower()}{text[1:]}, got {_short(repr(line['input']))}"
        if hint := _value_hint(line, location):
            text += f"; {hint}"
    label = f"{dotted(location)}: " if location else ""
    if not location and (placed := document.placed(text)) != text:  # an error of the whole job that names its field
        return placed
    return after_place(document.where(location, whole=line["type"] == "value_error"), f"{label}{text}")


def _value_hint(line: Mapping[str, Any], location: Location) -> str | None:
    value = line["input"]
    if line["type"] in ("list_type", "tuple_type") and isinstance(value, str) and location:
        return f"write {dotted(location)}: [{_short(value)}]"
    return value_hint(location, value)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # invalid name, or no permission
        return False


def _location_in_file(location: Location, value: Any) -> Location:
    """Location of an error in the job file: pydantic's location without the tags of union members.

    A tag, such as the name of a component, appears in pydantic's location where a field would, but the file holds the
    tag as a value or as a bare name.
    """
    found: Location = ()
    for part in location:
        fields = value if isinstance(value, Mapping) else {}
        if isinstance(part, str) and part not in fields and (part == value or part in fields.values()):
            continue
        if isinstance(part, str) and isinstance(value, list | int | float):  # these have no fields, so `part` is a tag
            continue
        found = (*found, part)
        is_there = part in fields or (isinstance(value, list) and isinstance(part, int) and part < len(value))
        value = value[part] if is_there else None
    return found
