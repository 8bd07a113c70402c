"""Command ``d9d certify``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from d9d_core.cli.options import AsJson, Files, NoPlugins, Strict, command_app, discover_plugins
from d9d_core.terminal.console import console_for
from d9d_core.untrusted import visible
from rich.table import Table

if TYPE_CHECKING:
    from d9d_verify.certify.certificate import Certificate

app = command_app()


@app.command()
def certify(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Directory of a model, name of a model plugin, or a model_type."),
    ],
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Shrink a model; check packed documents, layouts, LoRA and export. Exit status 1 if something differs."""
    from d9d_verify.certify.run import certify as run

    found = run(target, discover_plugins(plugin, no_plugins, strict_plugins), _note)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
    else:
        _print(found)
    if not found.holds:
        raise typer.Exit(1)


def _note(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - standard output has the result


def _print(found: Certificate) -> None:
    table = Table(box=None)
    for heading in ("layout or feature", "result", "largest deviation, or reason"):
        table.add_column(heading, overflow="fold")
    for cell in found.cells:
        table.add_row(cell.name, cell.standing, cell.detail)
    console = console_for()
    versions = ", ".join(
        f"{name} {found.versions[name]}" for name in ("torch", "transformers") if name in found.versions
    )
    of_type = "" if found.model_type is None else f", model_type {found.model_type}"
    console.print(f"model {found.model}{of_type}, config {found.config[:12]}, with {versions}", markup=False)
    console.print(table)
