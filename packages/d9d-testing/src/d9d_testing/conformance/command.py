"""``d9d plugins conform``: the conformance suites of an installed distribution, as a table and a badge."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.terminal.console import console_for
from rich.table import Table
from rich.text import Text

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

_COLOURS = {"passed": "green", "failed": "red", "missing": "yellow", "declarations": ""}


@app.command(no_args_is_help=True)
def conform_plugin(
    name: Annotated[str, typer.Argument(help="Name of an installed distribution.")],
    badge: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Directory for conformance.json and conformance.svg.")
    ] = None,
    suites: Annotated[
        list[Path],
        typer.Option(metavar="PATH", help="Test file or directory with further suites; may be repeated."),
    ] = [],  # noqa: B006 - typer reads the default
) -> None:
    """Run the conformance suites of a plugin's components. Exit status 1 if a suite fails or is missing."""
    # Imported late: the help text does not need these modules.
    from d9d_testing.conformance.badge import write_badge
    from d9d_testing.conformance.run import conform

    missing = next((path for path in suites if not path.exists()), None)
    if missing is not None:
        raise typer.BadParameter(f"{missing} does not exist", param_hint="--suites")
    outcome = conform(discover(PluginPolicy.from_environment(os.environ)), name, [path.resolve() for path in suites])
    console = console_for()
    table = Table(box=None, header_style="bold")
    for title in ("kind", "name", "passed", "failed", "skipped", "verdict"):
        table.add_column(title, justify="right" if title in ("passed", "failed", "skipped") else "left")
    for row in outcome.rows:
        counts = map(str, (row.passed, row.failed, row.skipped))
        table.add_row(row.kind, row.name, *counts, Text(row.verdict, _COLOURS[row.verdict]))
    console.print(table)
    for row in outcome.rows:
        if row.problem:
            console.print(Text(f"{row.kind} {row.name}: {row.problem}"), soft_wrap=True)
    for error in outcome.errors:
        console.print(Text(error, "red"), soft_wrap=True)
    verdict = "conforms" if outcome.passed else "does not conform"
    console.print(f"{outcome.name} {outcome.version} {verdict}: {outcome.count('passed')} tests passed")
    if badge is not None:
        for path in write_badge(badge, outcome, datetime.now(UTC).date()):
            console.print(f"  {path}")
    if not outcome.passed:
        raise typer.Exit(1)
