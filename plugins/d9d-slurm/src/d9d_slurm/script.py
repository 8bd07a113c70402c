"""Batch script of a Slurm job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from d9d_core.launcher import EXIT_FAILED, EXIT_FINISHED, LaunchRequest

from d9d_slurm.config import SlurmConfig


def batch_script(config: SlurmConfig, request: LaunchRequest) -> str:
    """Make the script for sbatch. #SBATCH lines hold only numbers and checked words; paths are quoted for the shell.

    Args:
        config: resources and restarts.
        request: job and number of processes.
    """
    command = shlex.join(request.command)
    cores = " --cpus-per-task=$SLURM_CPUS_PER_TASK" if config.cpus_per_task else ""
    job = shlex.quote(str(request.job_file))
    log = f'{shlex.quote(f"{request.folder}/slurm-")}"$SLURM_JOB_ID".log'
    shared = "run.dir must be a directory that all machines share"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in _options(config, request)),
        "# srun passes on the variables of this script.",
        "export SLURM_EXPORT_ENV=ALL",
        f'export PATH={shlex.quote(str(Path(request.command[0]).parent))}:"${{PATH:-/usr/local/bin:/usr/bin:/bin}}"',
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
        *config.setup,
        f"if [ ! -f {job} ]; then",
        f"    echo \"error: $(hostname) does not have\" {job}'; {shared}' >&2",
        f"    exit {EXIT_FAILED}",
        "fi",
        *_change_note(request),
        f"log={log}",
        'begin=$(stat -c %s "$log" 2>/dev/null || echo 0)',
        f"srun --kill-on-bad-exit=1{cores} {command}",
        "status=$?",
        "# srun returns the highest status of all ranks. If a rank ends by an error of the job, srun ends the other",
        "# ranks, whose statuses are higher.",
        f"if tail -c +$((begin + 1)) \"$log\" | grep -q 'srun: error: .*: Exited with exit code {EXIT_FAILED}$'; then",
        f"    status={EXIT_FAILED}",
        "fi",
        f"# {EXIT_FINISHED}: finished; {EXIT_FAILED}: an error in the job, which would repeat. "
        "Everything else is worth a restart.",
        f"if [ $status -ne {EXIT_FINISHED} ] && [ $status -ne {EXIT_FAILED} ] && "
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {config.restarts} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID" || echo "not requeued: cancelled, or restarts are disabled" >&2',
        "fi",
        "exit $status",
    ]
    return "\n".join(lines) + "\n"


def _change_note(request: LaunchRequest) -> Iterator[str]:
    """Yield the lines by which a restart says that the user's job file has changed."""
    if request.source is None:
        return
    file = shlex.quote(str(request.source))
    note = (
        f"note: {request.source} has changed since the submission; this restart trains the submitted job, "
        f"{request.job_file}; cancel and submit again to train the new one"
    )
    yield f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -r {file} ] &&'
    yield f'    [ "$(sha256sum < {file})" != "{request.source_sha256}  -" ]; then'
    yield f"    echo {shlex.quote(note)}"
    yield "fi"


def _options(config: SlurmConfig, request: LaunchRequest) -> Iterator[str]:
    """Yield the options of sbatch whose values are numbers or checked words, so they need no quoting."""
    gpus = config.gpus_per_node
    if gpus is None:
        gpus = 0 if request.device == "cpu" else request.processes
    yield f"nodes={request.nodes}"
    yield f"ntasks-per-node={request.processes}"
    if gpus:
        yield f"gpus-per-node={gpus}"
    for option, value in (
        ("cpus-per-task", config.cpus_per_task),
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("reservation", config.reservation),
        ("time", config.minutes),
    ):
        if value is not None:
            yield f"{option}={value}"
    if config.constraint is not None:
        yield f'constraint="{config.constraint}"'
    if config.memory_gib is not None:
        yield f"mem={config.memory_gib}G" if config.memory_gib else "mem=0"
    if config.exclusive:
        yield "exclusive"
    yield f"signal=TERM@{config.grace}"
    yield "requeue" if config.restarts else "no-requeue"
    yield "open-mode=append"
