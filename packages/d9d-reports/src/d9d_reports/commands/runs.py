"""Command ``d9d runs``: lists and compares runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from d9d_core.cli.options import AsJson, command_app, echo, say
from d9d_core.errors import JobError

if TYPE_CHECKING:
    from d9d_reports.runs.record import RunRecord

app = command_app("List runs and compare them.")


@app.command("list")
def runs_list(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that contains the runs.")],
    as_json: AsJson = False,
) -> None:
    """List the runs in a directory: status, steps, losses, times, and the job fields in which they differ."""
    from d9d_reports.runs.record import find_runs
    from d9d_reports.runs.tables import list_table

    records = find_runs([directory])
    if as_json:
        typer.echo(json.dumps(_described(records), indent=1))
    else:
        list_table(records)


@app.command("compare")
def runs_compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR|RUN...", help="Directories of runs, or directories that contain some.")
    ],
    series: Annotated[
        list[str],
        typer.Option("--series", metavar="NAME", help="Logged series; the first one is drawn; loss by default."),
    ] = [],  # noqa: B006 - typer reads the default
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the curves, .svg or .html (needs the extra plots).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: the job fields in which they differ, the last values of their series, and their curves."""
    from d9d_engine.sparklines import sparklines

    from d9d_reports.runs.record import find_runs, unique_names
    from d9d_reports.runs.tables import comparison_table

    if picture is not None and picture.suffix not in (".svg", ".html"):
        raise JobError(f"--picture: {picture} must end in .svg or .html")
    records = find_runs(runs)
    logged = dict.fromkeys(name for record in records for line in record.lines for name in line if name != "step")
    for name in series:
        if name not in logged:
            raise JobError(f"--series: no run has logged '{name}'; the runs have: {', '.join(logged) or 'nothing'}")
    chosen = series or [name for name in ("loss", "eval/loss") if name in logged] or ["loss"]
    labels = unique_names(records)
    curves = {label: record.points(chosen[0]) for label, record in zip(labels, records, strict=True)}
    if picture is not None:
        from d9d_engine.trackers.picture import draw_overlay

        draw_overlay(curves, picture, chosen[0])
        say(f"{chosen[0]} of {len(records)} runs in {picture}")
    if as_json:
        described = _described(records)
        for run, record in zip(described["runs"], records, strict=True):
            run["series"] = {name: record.points(name) for name in chosen}
        typer.echo(json.dumps(described, indent=1))
        return
    comparison_table(records, chosen)
    values = [value for points in curves.values() for _, value in points]
    if values:
        echo(f"\n{chosen[0]} over steps, from {min(values):.5g} to {max(values):.5g}")
        width = max(map(len, labels))
        for label, line in sparklines(curves).items():
            echo(f"{label:<{width}}  {line}")


def _described(records: list[RunRecord]) -> dict[str, Any]:
    from d9d_reports.runs.differences import differing

    fields = differing([record.job for record in records])
    return {
        "runs": [
            {
                "name": record.name,
                "directory": str(record.directory),
                "status": record.status,
                "error": record.error if record.status == "failed" else None,
                "step": record.step,
                "steps": record.total,
                "loss": record.last("loss"),
                "best_loss": record.best("loss"),
                "eval_loss": record.last("eval/loss"),
                "best_eval_loss": record.best("eval/loss"),
                "started": None if record.started is None else record.started.isoformat(),
                "seconds": record.seconds,
                "changed": {name: values[number] for name, values in fields.items()},
            }
            for number, record in enumerate(records)
        ]
    }
