"""Options of commands are called the same whatever release of typer is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for part in ("packages", "plugins") for path in ROOT.glob(f"{part}/*/src/**/*.py"))


def flags(command: Any) -> Iterator[Any]:
    """Options of a command, or of all commands of a group, that have no value."""
    for one in getattr(command, "commands", {"": command}).values():
        yield from (parameter for parameter in one.params if getattr(parameter, "is_flag", False))


def test_flags_of_installed_commands_are_off_unless_they_are_given() -> None:
    specs: list[Any] = [entry.spec for entry in discover(PluginPolicy()).entries("command")]
    found = {spec.key: [*flags(typer.main.get_command(spec.app.load()))] for spec in specs}
    assert sum(map(len, found.values())) > 20
    assert not {f"{key} {flag.opts[0]}" for key, flags in found.items() for flag in flags if flag.default}


def nameless(source: str) -> Iterator[str]:
    """Parameters whose option has no name but a metavar like it, which typer 0.27.0 takes for the name: ``--FILE``."""
    for argument in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)):
        for call in (node for node in ast.walk(argument) if isinstance(node, ast.Call)):
            metavars = [ast.literal_eval(given.value) for given in call.keywords if given.arg == "metavar"]
            if ast.unparse(call.func) == "typer.Option" and not call.args and argument.arg.upper() in metavars:
                yield argument.arg


def test_options_with_a_metavar_like_their_name_say_their_name() -> None:
    commands = [path for path in SOURCES if "typer" in path.read_text(encoding="utf-8")]
    assert len(commands) > 10
    found = {str(path.relative_to(ROOT)): [*nameless(path.read_text(encoding="utf-8"))] for path in commands}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(("name", "found"), [("", ["file"]), ('"--file", ', [])])
def test_an_option_without_its_name_is_found(name: str, found: list[str]) -> None:
    option = f'typer.Option({name}metavar="FILE")'
    assert [*nameless(f"def run(file: Annotated[str, {option}], other: int) -> None: ...")] == found
