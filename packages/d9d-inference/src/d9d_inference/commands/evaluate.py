"""Command ``d9d evaluate``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from d9d_core.cli.interrupts import interrupts_deferred
from d9d_core.cli.options import Files, NoPlugins, Overrides, Strict, command_app, discover_plugins, policy_of, say
from d9d_core.errors import JobError
from d9d_core.terminal.console import console_for
from d9d_engine.joining import silent
from d9d_engine.launch.process import Process, running
from d9d_engine.launch.start import Alone, Nproc, for_processes, launch, process_of_launcher, start_up
from d9d_engine.run.interrupt import STOPPED, Interrupts, Terminated

from d9d_inference.evaluation.subject import Request, Subject, find_subject, same_data

if TYPE_CHECKING:
    from d9d_inference.evaluation.result import Evaluated, Report

app = command_app()


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="JOB|RUN|MODEL", help="Job file, run, or pretrained model.")],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="FILE",
            help="File of documents or conversations; may be repeated. For a MODEL without --like, "
            "--set evaluation.sets.NAME.FIELD=VALUE changes a field of the dataset of NAME.jsonl.",
        ),
    ] = [],  # noqa: B006 - typer reads the default
    like: Annotated[
        Path | None,
        typer.Option("--like", "--job", metavar="JOB", help="Job with the task, data and layout for a MODEL."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="best|newest|STEP", help="Checkpoint of the run; by default the newest.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N rows of each dataset.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="JOB|RUN|MODEL", help="Compare with this model on the same samples.")
    ] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="File for the results as JSON; - prints them.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Nproc = None,
    alone: Alone = False,
) -> None:
    """Evaluate a model on whole datasets: from the evaluation section, the training data, or given files."""
    policy = policy_of(plugin, no_plugins, strict_plugins)

    def load(world_size: int | None) -> tuple[Subject, Subject | None]:
        registry = discover_plugins(plugin, no_plugins, strict_plugins)
        first = find_subject(target, Request(data, like, checkpoint, overrides, policy, world_size), registry)
        if compare is None:
            return first, None
        second = find_subject(compare, Request(like=first.job, policy=policy, world_size=world_size), registry)
        return first, same_data(second, first)

    with Interrupts().noted() as interrupts:
        try:
            env = process_of_launcher(os.environ, alone)
            if nproc is None:
                with running(env, os.environ, interrupts) as process:
                    report = _evaluate(process, interrupts, load, limit)
                if report is not None:
                    _publish(report, as_json)
                return
            if env.launcher is not None:
                raise JobError(f"--nproc: {env.launcher} has started this process; use its own options")
            with interrupts.raised():
                # With --nproc auto, the number of processes follows from the run's mesh, which is kept.
                number = nproc if nproc != "auto" else None
                loaded = for_processes(lambda size, _again: load(size if number else None)[0].job, nproc)
            words = _words(target, data, like, checkpoint, limit, compare, as_json, overrides, plugin)
            words += ["--no-plugins"] * no_plugins + ["--strict-plugins"] * strict_plugins
            raise typer.Exit(launch(loaded, ["evaluate", *words], 0, interrupts))
        except Terminated as signal:
            typer.echo(f"{signal}: stopped; nothing was measured", err=True)
            raise typer.Exit(STOPPED) from None


def _words(
    target: str,
    data: list[Path],
    like: Path | None,
    checkpoint: str | None,
    limit: int | None,
    compare: str | None,
    as_json: str | None,
    overrides: list[str],
    plugin: list[Path],
) -> list[str]:
    """Command-line arguments with which ``d9d evaluate`` starts its processes."""
    single = {"--like": like, "--checkpoint": checkpoint, "--limit": limit, "--compare": compare, "--json": as_json}
    words = [word for name, value in single.items() if value is not None for word in (name, str(value))]
    several: dict[str, Sequence[object]] = {"--data": data, "--set": overrides, "--plugin": plugin}
    words += [word for name, values in several.items() for value in values for word in (name, str(value))]
    return [*words, "--", target]


def _evaluate(
    process: Process,
    interrupts: Interrupts,
    load: Callable[[int | None], tuple[Subject, Subject | None]],
    limit: int | None,
) -> Report | None:
    """Evaluate in this process; return the report on the main rank."""
    env = process.env
    alone = env.launcher is None  # see d9d_engine.launch.start
    with start_up(interrupts, alone):
        first, other = load(env.world_size)
        first.job.check(env.world_size)
        if first.note is not None and not process.repeats:
            say(first.note)
    with start_up(), interrupts_deferred():
        from d9d_engine.distributed.mesh import describe_rank

        import d9d_inference.evaluation.compose  # noqa: F401 - imports torch and numpy

    reporter = None if alone else process.reporter(describe_rank(first.job.mesh.sizes(), env.rank))
    with first.job.joined(env, reporter) as topology:
        from d9d_inference.evaluation.compose import evaluate as measure

        with interrupts.raised():  # an interrupt ends the evaluation at once: there is nothing to save
            report = measure(first, topology, say if topology.is_main else silent, limit, other)
    return report if topology.is_main else None


def _publish(report: Report, as_json: str | None) -> None:
    """Print the tables, and write the JSON output if requested."""
    text = json.dumps(_finite(report.to_json()), indent=1)
    if as_json == "-":
        typer.echo(text)
        return
    if as_json is not None:
        try:
            Path(as_json).write_text(text + "\n")
        except OSError as error:
            raise JobError(f"--json: {as_json} cannot be written: {error.strerror or error}") from error
    _print_values(report.first)
    if report.other is not None:
        _print_values(report.other)
        console = console_for()
        for name, found in report.differences.items():
            console.print(
                f"{name}: loss {found.mean:+.6f}, {found.confidence:.0%} confidence interval "
                f"[{found.low:+.6f}, {found.high:+.6f}] over {found.samples:,} samples: {report.verdict(name)}"
            )


def _print_values(found: Evaluated) -> None:
    from rich.table import Table

    step = "" if found.step is None else f", step {found.step:,}"
    series = list(dict.fromkeys(name for values in found.sets.values() for name in values))
    table = Table("data", "samples", *series, title=f"{found.name}{step}", title_justify="left")
    for name, values in found.sets.items():
        cells = [f"{values[one]:.6g}" if one in values else "" for one in series]
        table.add_row(name, f"{found.samples[name]:,}", *cells)
    console_for().print(table)


def _finite(value: Any) -> Any:
    """Replace non-finite numbers by null, for JSON."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
