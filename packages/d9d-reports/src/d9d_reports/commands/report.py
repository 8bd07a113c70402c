"""Command ``d9d report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import command_app, say
from d9d_core.errors import JobError

app = command_app()


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or directories that contain some.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the page; report.html in the first directory by default."),
    ] = None,
) -> None:
    """Write one HTML page that needs no network: overlaid curves, tables, layout, start-up, plugins, job."""
    from d9d_reports.report.page import write_report
    from d9d_reports.runs.record import find_runs, unique_names

    path = runs[0] / "report.html" if output is None else output
    if path.suffix != ".html":
        raise JobError(f"--output: {path} must end in .html")
    records = find_runs(runs)
    write_report(dict(zip(unique_names(records), records, strict=True)), path)
    say(f"{'the run' if len(records) == 1 else f'{len(records)} runs'} in {path}, {path.stat().st_size / 1e6:.1f} MB")
