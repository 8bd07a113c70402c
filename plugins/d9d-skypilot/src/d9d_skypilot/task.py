"""Task of a job, as ``sky jobs launch`` reads it: resources, storage, and the shell code of each machine."""

from __future__ import annotations

import base64
import re
import shlex
from typing import Any

import yaml
from d9d_core.errors import LaunchError
from d9d_core.launcher import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, LaunchRequest

from d9d_skypilot.config import SkyPilotConfig

#: Port of the rendezvous on the first machine.
_PORT = 29_500
#: Largest number of characters of a task's name; SkyPilot appends to it to name machines.
_LONGEST = 40
#: Largest number of bytes of the job file, which is part of a shell command.
_LARGEST = 60_000


class _Readable(yaml.SafeDumper):
    """YAML dumper that writes a text of several lines on several lines."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def task_file(config: SkyPilotConfig, request: LaunchRequest, name: str) -> str:
    """Text of the task file.

    Args:
        config: machines and storage.
        request: job and number of processes.
        name: name of the task.

    Raises:
        LaunchError: the machines cannot run the job: it needs files of this machine, or storage that they do not have.
    """
    task = {
        "name": name,
        "num_nodes": request.nodes,
        "resources": _resources(config, request),
        **_storage(config, request),
        **({"setup": "\n".join(["set -e", *config.setup]) + "\n"} if config.setup else {}),
        "run": run_script(config, request),
    }
    return yaml.dump(task, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=1000)


def task_name(run: str, suffix: str) -> str:
    """Name of a task, which begins with a letter; the suffix tells submissions of the run apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[: _LONGEST - len(suffix) - 5].strip("-")
    return f"d9d-{plain}-{suffix}" if plain else f"d9d-{suffix}"


def _resources(config: SkyPilotConfig, request: LaunchRequest) -> dict[str, Any]:
    gpus = config.gpus_per_node or request.processes
    if config.gpu is None and request.device != "cpu":
        raise LaunchError(
            "gpu: SkyPilot must know which GPUs to look for; give --option gpu=H100, or train with --set device=cpu"
        )
    found = {
        "infra": config.infra,
        "accelerators": None if config.gpu is None else f"{config.gpu}:{gpus}",
        "cpus": None if config.cpus is None else f"{config.cpus}+",
        "memory": None if config.memory_gib is None else f"{config.memory_gib}+",
        "disk_size": config.disk_gib,
        "use_spot": config.spot or None,
        "image_id": None if config.image is None else f"docker:{config.image}",
        # After a stop on request, as before a preemption, SkyPilot continues the job on other machines. After a crash,
        # the script below restarts it, because SkyPilot's own restarts would also repeat an error of the job.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [EXIT_STOPPED]},
    }
    return {field: value for field, value in found.items() if value is not None}


def _storage(config: SkyPilotConfig, request: LaunchRequest) -> dict[str, Any]:
    if config.volume is not None:
        return {"volumes": {config.mount: config.volume}}
    if request.nodes > 1:
        raise LaunchError(
            f"--nodes {request.nodes}: several machines cannot write one run into a bucket, which each of them caches; "
            "give --option volume=NAME instead of bucket"
        )
    # d9d renames files of a run and appends to them, which a bucket without a cache does not support.
    return {"file_mounts": {config.mount: {"source": config.bucket, "mode": "MOUNT_CACHED"}}}


def run_script(config: SkyPilotConfig, request: LaunchRequest) -> str:
    """Shell code that each machine runs: it writes the job file, trains, and starts again after a crash.

    The job is encoded, because its text could end a quotation or look like a variable of SkyPilot.

    Raises:
        LaunchError: the job needs files of this machine, or is too long.
    """
    options = request.command[request.command.index(str(request.job_file)) + 1 :]
    if "--plugin" in options:
        raise LaunchError(
            "--plugin: the machines do not have files of this machine; put the plugin into a package that setup "
            "installs"
        )
    job = base64.b64encode(request.job.encode()).decode()
    if len(job) > _LARGEST:
        raise LaunchError(
            f"the job file has {len(request.job.encode()):,} bytes, and a command holds 45,000; shorten it"
        )
    train = shlex.join([config.python, "-m", "d9d_core", "train"])
    rest = shlex.join(["--set", f"run.dir={config.mount}", *options, "--nproc", str(request.processes)])
    several = f' --nodes {request.nodes} --node-rank "$SKYPILOT_NODE_RANK" --master "$master:{_PORT}"'
    lines = [
        'mkdir -p "$HOME/.d9d"',
        f'echo {job} | base64 -d > "$HOME/.d9d/job.yaml"',
        'master=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        "# SkyPilot asks this shell to end; the ranks then save.",
        "trap 'kill -TERM \"$ranks\" 2>/dev/null' TERM",
        "restarts=0",
        "while :; do",
        f'    {train} "$HOME/.d9d/job.yaml" {rest}{several if request.nodes > 1 else " --alone"} &',
        "    ranks=$!",
        '    wait "$ranks"',
        "    status=$?",
        '    while kill -0 "$ranks" 2>/dev/null; do',
        '        wait "$ranks"',
        "        status=$?",
        "    done",
        f"    # {EXIT_FINISHED}: finished; {EXIT_FAILED}: an error in the job, which would repeat;",
        f"    # {EXIT_STOPPED}: stopped and saved. Everything else is worth a restart.",
        f"    case $status in {EXIT_FINISHED} | {EXIT_FAILED} | {EXIT_STOPPED}) break ;; esac",
        f'    [ "$restarts" -lt {config.restarts} ] || break',
        "    restarts=$((restarts + 1))",
        f'    echo "d9d: status $status; restart $restarts of {config.restarts}"',
        "    sleep 5",
        "done",
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"
