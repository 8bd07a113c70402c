"""Script of a Slurm array job that runs a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from d9d_reports.runs.grid import SweepRun


def array_script(
    runs: Sequence[SweepRun], command: Sequence[str], options: Sequence[str], directory: Path, at_once: int | None
) -> str:
    """Make the script of a Slurm array job, with one task per run, in order.

    Tasks that are submitted again skip finished runs and continue unfinished runs, as ``d9d train`` does. SIGTERM,
    which Slurm sends before the time limit, lets a run save.

    Args:
        runs: combinations of the grid.
        command: arguments of ``d9d`` for each run, before its overrides.
        options: arguments after the overrides.
        directory: directory of the sweep, and of its output.
        at_once: largest number of concurrent tasks; ``None`` leaves this to Slurm.
    """
    limit = "" if at_once is None else f"%{at_once}"
    cases = []
    for number, run in enumerate(runs):
        overrides = " ".join(f"--set {shlex.quote(override)}" for override in run.overrides)
        cases.append(f"  {number}) set -- {overrides} ;;  # {run.name}")
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --array=0-{len(runs) - 1}{limit}",
            f"#SBATCH --job-name={directory.name}",
            f"#SBATCH --output={directory}/slurm-%A_%a.log",
            "# Resources are options of sbatch: sbatch --gpus 1 --time 4:00:00 THIS_FILE",
            'case "$SLURM_ARRAY_TASK_ID" in',
            *cases,
            '  *) echo "no task $SLURM_ARRAY_TASK_ID in this array" >&2; exit 2 ;;',
            "esac",
            f'exec d9d {shlex.join(command)} "$@" {shlex.join(options)}'.rstrip(),
            "",
        ]
    )
