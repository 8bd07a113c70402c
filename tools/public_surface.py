"""Writes down the public surface, so that a change of it is seen in a review.

    uv run python tools/public_surface.py           write tests/public_surface.json
    uv run python tools/public_surface.py --check   exit with 1 if it is out of date

It covers the names of the declared modules, hooks and record fields, protocols, traits, events, the job file's fields,
and the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "tests" / "public_surface.json"


#: Modules that other packages may import; tests/test_architecture.py holds everybody to them.
DECLARED = (
    "d9d_core.plugin",
    "d9d_core.extend",
    "d9d_core.testing",
    "d9d_weights",
    "d9d_engine.api",
    "d9d_engine.extend",
    "d9d_engine.testing",
)


def surface() -> dict[str, Any]:
    """Everything that users and plugin authors may rely on."""
    from d9d_core import extend
    from d9d_core.plugin.hooks import API_VERSION, KINDS
    from d9d_core.traits import TRAITS

    return {
        "plugin_api": API_VERSION,
        "names": {module: sorted(importlib.import_module(module).__all__) for module in DECLARED},
        "hooks": {kind.hook: _fields(kind.record) for kind in KINDS},
        "protocols": {name: _members(getattr(extend, name)) for name in extend.__all__ if _is_contract(extend, name)},
        "traits": {token: trait.__name__ for token, trait in TRAITS.items()},
        "events": {event.__name__: _fields(event) for event in extend.CATALOGUE},
        "job file": _sections(),
        "command line": _commands(),
    }


def _is_contract(module: Any, name: str) -> bool:
    value = getattr(module, name)
    return inspect.isclass(value) and (getattr(value, "_is_protocol", False) or dataclasses.is_dataclass(value))


def _fields(record: type) -> list[str]:
    required = (dataclasses.MISSING, dataclasses.MISSING)
    return [f.name + ("" if (f.default, f.default_factory) == required else "=") for f in dataclasses.fields(record)]


def _members(contract: type) -> list[str]:
    members = {key: member for key, member in vars(contract).items() if not key.startswith("_")}
    return sorted(f"{key}{_signature(member)}" for key, member in members.items() if not isinstance(member, str))


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
    import option_table  # beside this file

    return {
        name: sorted(word for parameter in command.params for word in parameter.opts)
        for name, command in option_table.commands().items()
    }


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
