"""Writes the table of command-line options in docs/command-line.md.

    uv run python tools/option_table.py           write docs/command-line.md
    uv run python tools/option_table.py --check   exit with 1 if it is out of date

The table is read from the commands of all packages of the repository; the meanings are their help texts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from d9d_core.cli.app import app
from d9d_core.plugin import CommandSpec
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "command-line.md"
BEGIN, END = "<!-- options: begin, by tools/option_table.py -->", "<!-- options: end -->"
#: Options that typer adds for shell completion.
LEFT_OUT = ("--install-completion", "--show-completion")


def commands() -> dict[str, Any]:
    """Name -> command; sub-commands have names of two words."""
    found = dict(_commands_of(typer.main.get_command(app)))
    for entry in discover(PluginPolicy()).entries("command"):
        assert isinstance(entry.spec, CommandSpec)
        # Other plugins may be installed here.
        if entry.origin.distribution in members():
            command: Any = typer.main.get_command(entry.spec.app.load())
            if hasattr(command, "commands"):
                found |= _commands_of(command, f"{entry.spec.key} ")
            else:
                found[entry.spec.key] = command
    return found


def members() -> set[str]:
    """Names of the repository's distributions."""
    return {path.parent.name for path in (*ROOT.glob("packages/*/src"), *ROOT.glob("plugins/*/src"))}


def _commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands_of(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def table() -> str:
    """One row for each option, default and meaning, with the commands that accept it."""
    own = commands()
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, command in [("d9d", typer.main.get_command(app)), *own.items()]:
        for option in command.params:
            if option.opts[0].startswith("--") and option.opts[0] not in LEFT_OUT and not option.hidden:
                shown = f"{option.opts[0]} {option.metavar or ''}".strip()
                found.setdefault((shown, _default(option), option.help), []).append(name)
    rows = [
        f"| `{_cell(shown)}` | {_several(names, list(own))} | {default} | {_cell(text)} |"
        for (shown, default, text), names in found.items()
    ]
    return "\n".join(["| option | of | default | meaning |", "|---|---|---|---|", *rows])


def _default(option: Any) -> str:
    """Default of an option and the least and the largest number that it accepts; empty for a plain flag or text."""
    value = option.default
    default = "" if value is None or value is False or value in ((), [], "") else f"`{_cell(str(value))}`"
    bounds = ("at least", option.min), ("at most", option.max)
    limits = [f"{words} {bound}" for words, bound in bounds if bound is not None]
    return ", ".join(filter(None, [default, *limits]))


def _cell(text: str) -> str:
    """Text that cannot end a cell or begin an HTML tag."""
    return text.replace("|", "\\|").replace(" <", " &lt;")


def _several(names: list[str], everything: list[str]) -> str:
    lacking = [name for name in everything if name not in names]
    if not lacking:
        return "all"
    if len(lacking) < len(everything) / 2:
        return f"all but {', '.join(f'`{name}`' for name in lacking)}"
    return ", ".join(f"`{name}`" for name in names)


def written(text: str) -> str:
    """The page with an up-to-date table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Write the table, or check it."""
    if set(sys.argv[1:]) - {"--check"}:
        raise SystemExit(__doc__)
    text = PAGE.read_text("utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written(text), encoding="utf-8", newline="\n")
    elif written(text) != text:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is out of date; run: uv run python tools/option_table.py")


if __name__ == "__main__":
    main()
