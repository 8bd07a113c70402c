"""Launcher of an engine, built from the options of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_core.components.instantiate import instantiate
from d9d_core.config import PluginConfig, dotted
from d9d_core.errors import JobError, PluginError
from d9d_core.job_file.document import Document
from d9d_core.job_file.lookup import load_config
from d9d_core.job_file.reading import read_yaml
from d9d_core.launcher import Launcher
from d9d_core.plugin import LauncherSpec
from d9d_core.registry.capabilities import Chosen, missing_modules
from d9d_core.registry.registry import Registry
from pydantic import ValidationError


def read_options(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Read the fields of an engine's config from a YAML, TOML or JSON file; assignments ``FIELD=VALUE`` override them.

    Raises:
        JobError: the file is missing or malformed, or an assignment is malformed.
    """
    if file is not None and not file.is_file():
        raise JobError(f"--options {file}: no such file; name a YAML, TOML or JSON file with the engine's options")
    values = {} if file is None else dict(Document.read(file).values)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise JobError(f"--option {assignment}: write FIELD=VALUE, for example --option partition=gpu")
        values[name] = read_yaml(text, f"--option {name}")[0]
    return values


def engine_config(registry: Registry, engine: str, fields: Mapping[str, Any]) -> PluginConfig:
    """Validate the options of an engine.

    Args:
        registry: registry that resolves the name of the engine.
        engine: name of a launcher.
        fields: fields of the launcher's config, without ``name``.

    Raises:
        PluginError: there is no launcher of this name, or a library that the launcher needs is missing.
        JobError: an option is unknown or has a wrong value; one line per option.
    """
    try:
        entry = registry.find("launcher", engine)
    except PluginError as error:
        more = "" if "pip install" in str(error) else "; an engine is a plugin: install the one that offers it"
        raise PluginError(f"--engine {engine}: {error}{more}") from error
    assert isinstance(entry.spec, LauncherSpec)
    if missing := missing_modules(entry.spec):
        names = " ".join(missing)
        raise PluginError(f"launcher {entry} needs {names}; install it with: pip install {names}")
    try:
        config = load_config(entry).model_validate(
            {**fields, "name": entry.spec.key}, context={"registry": registry, "label": f"the engine {entry}"}
        )
    except ValidationError as error:
        lines = [_problem(line["loc"], line["msg"], line["input"]) for line in error.errors()]
        raise JobError("\n".join(lines)) from error
    return config


def build_launcher(registry: Registry, engine: str, config: PluginConfig) -> Launcher:
    """Build the launcher of an engine.

    Raises:
        BuildError: the launcher cannot be imported, or lacks a method.
    """
    launcher: Launcher = instantiate(Chosen("--engine", registry.find("launcher", engine)), config)
    return launcher


def _problem(location: tuple[int | str, ...], message: str, value: object) -> str:
    text = message.removeprefix("Value error, ")
    # A user may have written the value of a secret instead of its name.
    hidden = any("secret" in str(part).lower() for part in location)
    found = "" if hidden or text.startswith("not a field of") else f", got {str(value)[:80]!r}"
    return f"--option {dotted(location)}: {text[:1].lower()}{text[1:]}{found}"
