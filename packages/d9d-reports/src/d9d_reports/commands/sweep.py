"""Command ``d9d sweep``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, command_app, policy_of, say
from d9d_core.cli.streams import output_is_incidental
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_engine.launch.start import for_processes

app = command_app()


@app.command()
def sweep(
    job: JobPath,
    grid: Annotated[list[str], typer.Option("--grid", metavar="FIELD=A,B", help="Values of a field; may be repeated.")],
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Directory for the runs; <run.dir>/<run.name>-sweep by default."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Number of runs at a time; 1 by default.", min=1)
    ] = None,
    nproc: Annotated[
        str | None, typer.Option(metavar="N", help="Number of processes of each run, as for train.")
    ] = None,
    slurm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the script of a Slurm array job instead of running.")
    ] = None,
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Train each combination of the grid as a separate run. Finished runs are skipped, unfinished ones continue."""
    from d9d_reports.runs.array_script import array_script
    from d9d_reports.runs.grid import combine
    from d9d_reports.runs.record import find_runs
    from d9d_reports.runs.sweep import Sweep
    from d9d_reports.runs.tables import sweep_table

    output_is_incidental()

    def checked(load: Callable[[int | None, bool], Job]) -> Job:
        """Load and check the job of a run, as ``d9d train`` does with this ``--nproc``."""
        if nproc is not None:
            return for_processes(load, nproc)
        loaded = load(None, False)
        loaded.check()
        return loaded

    policy = policy_of(plugin, no_plugins, strict_plugins)
    runs = combine(job, grid, overrides, policy, directory, checked)
    options = [word for file in plugin for word in ("--plugin", str(file))]
    options += ["--no-plugins"] * no_plugins + ["--strict-plugins"] * strict_plugins
    options += [] if nproc is None else ["--nproc", nproc]
    parent = runs[0].directory.parent
    if slurm is not None:
        if slurm.exists():
            raise JobError(f"--slurm: {slurm} exists; name another file, or remove it")
        parent.mkdir(parents=True, exist_ok=True)  # Slurm does not create the output directory
        slurm.write_text(array_script(runs, ["train", str(job)], options, parent, jobs), encoding="utf-8")
        say(f"{len(runs)} tasks in {slurm}; submit it with: sbatch {slurm}")
        return
    whole = Sweep(runs, ["train", str(job)], options, jobs or 1, say)
    interrupted = whole.run()
    records = {record.name: record for record in (find_runs([parent]) if any(parent.glob("*/job.yaml")) else [])}
    sweep_table(whole, records)
    if interrupted:
        done = "finished runs are complete, runs stopped in training are saved"
        raise KeyboardInterrupt(f"{done}; start the sweep again to continue")
    if whole.errors:
        raise typer.Exit(1)
