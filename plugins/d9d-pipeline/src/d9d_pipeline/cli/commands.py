"""Commands ``d9d pipeline show`` and ``d9d pipeline compare``; they need no GPU and no torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.errors import D9dError, JobError, PluginError
from d9d_core.program.text import format_programs
from d9d_core.program.validation import placement
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

from d9d_pipeline.cli.report import Row, print_comparison, print_simulation, summary
from d9d_pipeline.cli.selection import by_name, from_job, is_job
from d9d_pipeline.schedule.inference import inference
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.picture import draw
from d9d_pipeline.simulator.run import simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show a pipeline schedule, and compare schedules, without a GPU.",
)

CostsText = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="f=1,b=2,w=1,t=0.1",
        help="Times of one microbatch through all stages of a rank: f forward, b whole backward, w the weight "
        "gradients' share of b; t transfer of a tensor to another rank; o hidden part of an overlapped pair, 0 to 1.",
    ),
]
Buffers = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Tensors in transit between two ranks before a send waits; default: no limit."
    ),
]
Files = Annotated[
    list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(
    target: Annotated[str, typer.Argument(metavar="NAME|JOB", help="A schedule, or a job file that names one.")],
    pp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Pipeline ranks; by default the job's.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Microbatches; by default the job's.")
    ] = None,
    costs: CostsText = "",
    buffers: Buffers = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="A field of the schedule, or of the job file; may be repeated."
        ),
    ] = [],  # noqa: B006 - typer reads the default
    forward_only: Annotated[bool, typer.Option("--inference", help="Show the program of an evaluation.")] = False,
    program: Annotated[bool, typer.Option("--program", help="Print each rank's actions instead.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="SVG file to write; default name: the schedule's (needs the extra plots of d9d-engine).",
        ),
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
) -> None:
    """Print what each rank computes and holds in memory, and draw the timeline."""
    chosen = from_job(target, overrides, plugin) if is_job(target) else by_name(_registry(plugin), target, overrides)
    chosen = chosen.at(pp, microbatches)
    programs = chosen.programs()
    if forward_only:
        programs = inference(tuple(placement(programs)), chosen.microbatches)
    if program:
        sys.stdout.write(format_programs(programs) + "\n")
        return
    simulation = simulate(programs, _costs(costs), buffers=buffers, training=not forward_only)
    kind = "inference" if forward_only else "step"
    title = f"{chosen.name}: {kind} of {chosen.microbatches} microbatches on {chosen.ranks} ranks"
    path = picture or Path(f"{chosen.name}-{kind}-pp{chosen.ranks}-mb{chosen.microbatches}.svg")
    missing = None
    try:
        path.write_text(draw(simulation, title), "utf-8")
    except PluginError as error:
        if picture is not None:
            raise
        missing = str(error)  # without plots the numbers are still printed
    if as_json:
        drawn = None if missing else str(path)
        sys.stdout.write(
            json.dumps({"schedule": chosen.name, "picture": drawn, **summary(simulation)}, indent=1) + "\n"
        )
    else:
        print_simulation(simulation, title)
        typer.echo(f"no timeline: {missing}" if missing else f"timeline in {path}")


@app.command()
def compare(
    pp: Annotated[int, typer.Option(metavar="N", min=1, help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option(metavar="M", min=1, help="Microbatches of a step.")],
    costs: CostsText = "",
    buffers: Buffers = None,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="LIMIT", help="Memory limit: activations of a rank, in microbatches through all stages."
        ),
    ] = None,
    as_json: AsJson = False,
    plugin: Files = [],  # noqa: B006
) -> None:
    """Rank all installed schedules, with their default fields, by the time of a step."""
    registry = _registry(plugin)
    times = _costs(costs)
    names = [entry.spec.key for entry in registry.entries("schedule")]
    rows = [_compared(registry, name, pp, microbatches, times, buffers, memory) for name in names]
    rows.sort(key=Row.order)
    if as_json:
        sys.stdout.write(json.dumps([row.facts() for row in rows], indent=1) + "\n")
    else:
        print_comparison(rows, f"{microbatches} microbatches on {pp} ranks", memory)


def _compared(
    registry: Registry, name: str, pp: int, microbatches: int, costs: Costs, buffers: int | None, memory: float | None
) -> Row:
    try:
        programs = by_name(registry, name, []).at(pp, microbatches).programs()
        step = simulate(programs, costs, buffers=buffers)
        return Row(name, step, memory, len(placement(programs)[0]))
    except D9dError as error:
        return Row(name, None, memory, problem=str(error))


def _costs(text: str) -> Costs:
    try:
        return Costs.parse(text)
    except ValueError as error:
        raise JobError(f"--{error}") from error


def _registry(files: list[Path]) -> Registry:
    return discover(PluginPolicy.from_environment(os.environ) | PluginPolicy(files=tuple(files)))
