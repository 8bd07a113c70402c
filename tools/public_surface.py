"""Writes down the public surface, so that a change of it is seen in a review.

    uv run python tools/public_surface.py           write tests/public_surface.json
    uv run python tools/public_surface.py --check   exit with 1 if it is out of date

It covers the names of the declared modules, hooks and record fields, protocols, traits, events, the job file's fields,
and the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "tests" / "public_surface.json"


def surface() -> dict[str, Any]:
    """Everything that users and plugin authors may rely on."""
    import d9d_core.plugin
    from d9d_core import events, protocols, traits
    from d9d_core.plugin import API_VERSION, KINDS
    from d9d_engine import api

    return {
        "plugin_api": API_VERSION,
        "d9d_engine.api": sorted(api.__all__),
        "d9d_core.plugin": sorted(d9d_core.plugin.__all__),
        "hooks": {kind.hook: _fields(kind.record) for kind in KINDS},
        "protocols": _protocols(protocols),
        "traits": _protocols(traits),
        "events": {event.__name__: _fields(event) for event in events.CATALOGUE},
        "job file": _sections(),
        "command line": _commands(),
    }


def _fields(record: type) -> list[str]:
    required = (dataclasses.MISSING, dataclasses.MISSING)
    return [f.name + ("" if (f.default, f.default_factory) == required else "=") for f in dataclasses.fields(record)]


def _protocols(module: Any) -> dict[str, Any]:
    found = {}
    for name, value in vars(module).items():
        if not inspect.isclass(value) or value.__module__ != module.__name__ or name.startswith("_"):
            continue
        members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
        found[name] = sorted(
            f"{key}{_signature(member)}" for key, member in members.items() if not isinstance(member, str)
        )
    return found


def _signature(member: Any) -> str:
    return f"({', '.join(inspect.signature(member).parameters)})" if inspect.isfunction(member) else ""


def _sections() -> dict[str, Any]:
    from d9d_core.config.job import JobConfig
    from d9d_core.extend import Section

    def walk(section: type[Section]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, field in section.model_fields.items():
            nested: Any = field.annotation
            is_section = inspect.isclass(nested) and issubclass(nested, Section) and nested.__module__.endswith(".job")
            fields[name] = walk(nested) if is_section else ("required" if field.is_required() else "optional")
        return fields

    return walk(JobConfig)


def _commands() -> dict[str, Any]:
    import typer.main
    from d9d_core.cli.main import app, plugins

    def options(command: Any) -> list[str]:
        return sorted(word for parameter in command.params for word in parameter.opts)

    commands = {name: options(command) for name, command in typer.main.get_command(app).commands.items()}  # type: ignore[attr-defined]
    inner = typer.main.get_command(plugins).commands.items()  # type: ignore[attr-defined]
    return commands | {f"plugins {name}": options(command) for name, command in inner}


def main(arguments: list[str]) -> int:
    """Write the file, or compare with it."""
    text = json.dumps(surface(), indent=1, sort_keys=True) + "\n"
    if arguments == ["--check"]:
        if FILE.read_text("utf-8") == text:
            return 0
        print("the public surface changed; if that is meant: uv run python tools/public_surface.py", file=sys.stderr)
        return 1
    FILE.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
