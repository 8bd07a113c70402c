"""Command ``d9d verify``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from d9d_core.cli.options import AsJson, Files, JobPath, NoPlugins, Overrides, Strict, command_app, load_job
from d9d_core.terminal.console import console_for
from d9d_core.untrusted import visible
from d9d_engine.job import Job
from rich.table import Table

if TYPE_CHECKING:
    from d9d_verify.compare import Verdict

app = command_app()


@app.command()
def verify(
    job: JobPath,
    layout: Annotated[
        list[str],
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="Layout such as dp_shard=2:fsdp or pp=2:1f1b; may be repeated; by default the job's.",
        ),
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(metavar="N", help="Number of optimizer steps to compare.", min=1)] = 4,
    max_ranks: Annotated[
        int, typer.Option(metavar="N", help="Largest number of processes for the job's own layout.", min=1)
    ] = 8,
    as_json: AsJson = False,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Compare all values of some steps in scaled-down layouts with one process. Exit status 1 if one differs."""
    loaded = load_job(Job, job, overrides, plugin, no_plugins, strict_plugins)
    if not verify_job(loaded, layout, steps, max_ranks, as_json):
        raise typer.Exit(1)


def verify_job(job: Job, layouts: Sequence[str], steps: int, max_ranks: int, as_json: bool) -> bool:
    """Compare layouts and print the result; return whether all passed."""
    from d9d_verify.layouts import own_layout, parse_layout
    from d9d_verify.run import verify

    chosen = [parse_layout(text, job) for text in layouts] or [own_layout(job, max_ranks)]
    verdicts = verify(job, chosen, steps, _note)
    if as_json:
        sys.stdout.write(json.dumps([verdict.to_json() for verdict in verdicts], indent=1) + "\n")
    else:
        _print(verdicts)
    return all(verdict.passed for verdict in verdicts)


def _note(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - standard output has the result


def _print(verdicts: Sequence[Verdict]) -> None:
    table = Table(box=None)
    for heading in (
        "layout",
        "loss",
        "gradient norm",
        "worst angle (1-cos)",
        "worst length",
        "worst update",
        "verdict",
    ):
        table.add_column(heading)
    for verdict in verdicts:
        diverged = "" if verdict.diverged is None else f"step {verdict.diverged[0] + 1}: {verdict.diverged[1]}"
        table.add_row(
            verdict.layout,
            f"{verdict.loss:.1e}",
            f"{verdict.grad_norm:.1e}",
            f"{verdict.angle[0]:.1e} {verdict.angle[1]}",
            f"{verdict.norm[0]:.1e} {verdict.norm[1]}",
            f"{verdict.update[0]:.1e} {verdict.update[1]}",
            "pass" if verdict.passed else f"FAIL {diverged}",
        )
    console_for().print(table)
