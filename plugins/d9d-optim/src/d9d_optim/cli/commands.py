"""Command ``d9d lr show``: the learning rate of each step of a job, without running it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import D9dError, JobError, PluginError
from d9d_core.job import JobFile
from d9d_core.optimizer import LrSchedule
from d9d_core.plugin import LrScheduleSpec
from d9d_core.registry.entries import plugin_error
from d9d_core.registry.policy import PluginPolicy

from d9d_optim.cli.picture import svg_plot, text_plot

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show the learning rate of a job, step by step.",
)


@app.callback()
def lr() -> None:
    """Show the learning rate of a job, step by step."""


@app.command()
def show(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML, TOML or JSON.")],
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of the run; required if the job gives epochs.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="SVG file to write; by default named after the job file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job file; may be repeated."),
    ] = [],  # noqa: B006 - typer reads the default
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Plot the learning rate of each step of a job."""
    loaded = JobFile.load(job, overrides=overrides, policy=PluginPolicy(files=tuple(plugin)))
    total = steps or loaded.steps
    if total is None:
        raise JobError("the length of the run depends on the data, which is not read; give --steps")
    rates = _rates(loaded, total)
    path = picture or Path(f"{job.stem}-lr.svg")
    name = loaded.lr_schedule.selector if loaded.lr_schedule else "constant"
    title = f"{name}, {total:,} steps"
    try:
        path.write_text(svg_plot(rates, title), "utf-8")
    except OSError as error:
        raise JobError(f"--picture {path}: cannot be written: {error.strerror or error}") from error
    if as_json:
        sys.stdout.write(json.dumps({"schedule": name, "picture": str(path), "lr": rates}) + "\n")
        return
    peak = max(range(total), key=rates.__getitem__)
    typer.echo(f"{title}\n")
    typer.echo(text_plot(rates))
    typer.echo(f"\nfirst {rates[0]:.4g}, highest {rates[peak]:.4g} in step {peak}, last {rates[-1]:.4g}")
    typer.echo(f"picture in {path}")


def _rates(job: JobFile, total: int) -> list[float]:
    """Learning rate of each step; the factor of the schedule if the optimizer has no ``lr``."""
    base = getattr(job.optimizer, "lr", 1.0)
    schedule = _schedule(job, total)
    return [base * schedule(step) for step in range(total)]


def _schedule(job: JobFile, total: int) -> LrSchedule:
    if job.lr_schedule is None:
        return lambda _step: 1.0
    entry = job.registry.find("lr schedule", job.lr_schedule.selector)
    spec = entry.spec
    if not isinstance(spec, LrScheduleSpec):
        raise PluginError(f"lr schedule {entry} is declared with a {type(spec).__name__}; it takes a LrScheduleSpec")
    try:
        schedule: LrSchedule = spec.build.load()(job.lr_schedule, total)
    except D9dError:
        raise
    except FOREIGN_FAILURES as error:
        raise plugin_error(f"lr schedule {entry}: {spec.build} failed: {error!r}", error) from error
    return schedule
