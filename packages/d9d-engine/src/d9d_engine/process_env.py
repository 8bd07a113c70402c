"""Rank and sizes of this process, read from the environment variables of launchers. Imports no torch."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from d9d_core.errors import JobError

__all__ = ["ProcessEnv"]

Launcher = Literal["torchrun", "slurm", "mpi"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Pattern of one part of a node list, such as ``rack[1-2]node[01-03,7]``.
_HOSTS = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
#: Variables with rank, world size, local rank and local world size: Open MPI; MPICH and Intel MPI; PALS.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_LEFT = "or give --alone if these variables are left over from another program"
#: Port of torch's examples; used if the launcher sets a host only.
_PORT = 29_500
#: Variables that mark this process, or its machine, as one of several.
_STARTED = (
    *_TORCHRUN, *_SLURM, *(name for names in _MPI for name in names), "PET_NNODES", "PET_NPROC_PER_NODE",
    "SKYPILOT_NUM_NODES", "JOB_COMPLETION_INDEX",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessEnv:
    """Rank of this process and number of processes of the job, as the launcher set them; by default, one process.

    Attributes:
        rank: number of this process.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        local_world_size: number of processes on this machine.
        node: name of this machine.
        launcher: launcher that started the processes; ``None`` for a single process.
        master: host and port of the rendezvous; ``None`` if the launcher set none.
        node_rank: number of this machine.
        num_nodes: number of machines.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = ""
    launcher: Launcher | None = None
    master: tuple[str, int] | None = None
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise JobError(f"{self._source}: rank {self.rank} does not exist among {self.world_size} processes")
        if not 0 <= self.local_rank < self.local_world_size:
            raise JobError(
                f"{self._source}: local rank {self.local_rank} does not exist among "
                f"{self.local_world_size} processes of this machine"
            )
        if self.local_world_size > self.world_size:
            raise JobError(
                f"{self._source}: {self.local_world_size} processes on this machine are more than all {self.world_size}"
            )
        if not 0 <= self.node_rank < self.num_nodes:
            raise JobError(f"{self._source}: machine {self.node_rank} does not exist among {self.num_nodes} machines")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ProcessEnv:
        """Read the variables of torchrun, else MPI, else a Slurm step; without any of them, assume one process.

        ``RANK`` and ``WORLD_SIZE`` without ``LOCAL_RANK`` mean one process per machine. Variables of a Slurm batch
        script outside of ``srun`` are ignored: its commands are single processes.

        Raises:
            JobError: variables are missing, malformed or contradict each other.
        """
        node = environ.get("SLURMD_NODENAME") or platform.node()
        if any(name in environ for name in _TORCHRUN[:3]):
            env = _torchrun(environ)
            nodes = _nodes(environ, env, "GROUP_RANK", ("GROUP_WORLD_SIZE",))
            return cls(*env, node, "torchrun", _torchrun_master(environ), *nodes)
        if (names := _mpi_names(environ)) is not None:
            env = _mpi(environ, names)
            if env[1] > 1:
                return cls(*env, node, "mpi", _mpi_master(environ), *_nodes(environ, env, "", ()))
        if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
            env = _slurm(environ)
            if env[1] > 1:
                nodes = _nodes(environ, env, "SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
                return cls(*env, node, "slurm", _slurm_master(environ), *nodes)
        return cls(node=node)

    @property
    def _source(self) -> str:
        names = {
            "torchrun": ", ".join(_TORCHRUN),
            "slurm": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID",
            "mpi": "variables of MPI",
        }
        return names[self.launcher] if self.launcher else "process environment"


def expand_hosts(text: str) -> list[str]:
    """Expand the hosts of a Slurm node list: ``node[01-03,7],gpu2`` is node01, node02, node03, node7, gpu2.

    Raises:
        JobError: the text is not a node list.
    """
    if not re.fullmatch(f"{_HOSTS}(,{_HOSTS})*", text):
        raise JobError(
            f"SLURM_STEP_NODELIST or SLURM_JOB_NODELIST: '{text}' is not a node list such as node[01-03,7],gpu2"
        )
    hosts = []
    for part in re.findall(_HOSTS, text):
        expanded = [""]
        for piece in re.split(r"(\[[^\]]*\])", part):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            expanded = [head + choice for head in expanded for choice in choices]
        hosts += expanded
    return hosts


def _numbers(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Expand the tasks on each node of a Slurm step: ``4(x2),3`` is 4, 4, 3.

    Raises:
        JobError: the text is not a list of counts.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise JobError(
                f"SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE: '{text}' is not a list of counts such as 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _torchrun(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    if not any(environ.get(name) for name in _TORCHRUN[2:]):  # one process on each machine
        _need(environ, _TORCHRUN[:2], "set both of them, or all variables that torchrun sets")
        return _number(environ, "RANK"), _number(environ, "WORLD_SIZE"), 0, 1
    _need(environ, _TORCHRUN, "torchrun sets all of them")
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in _TORCHRUN)
    return rank, world_size, local_rank, local_world_size


def _torchrun_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    # Without a torchrun agent, the address of the rendezvous must be in the variables.
    by_hand = not environ.get("LOCAL_RANK") and environ["WORLD_SIZE"] != "1"
    if not by_hand and not any(name in environ for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    _need(environ, ("MASTER_ADDR", "MASTER_PORT"), "torchrun sets both")
    return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")


def _mpi_names(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Variables of the MPI that started this process; ``None`` without MPI or if Slurm set the PMI variables."""
    named = [names for names in _MPI if names[0] in environ or names[1] in environ]
    by_slurm = environ.get("PMI_RANK") == environ.get("SLURM_PROCID") and "SLURM_LOCALID" in environ
    if not named or ("OMPI_COMM_WORLD_RANK" not in environ and by_slurm):
        return None
    return next((names for names in named if names[2] in environ), named[0])


def _mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int, int, int, int]:
    if environ.get(names[1]) == "1":
        return 0, 1, 0, 1
    _need(environ, names, "mpirun and mpiexec set all of them")
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in names)
    return rank, world_size, local_rank, local_world_size


def _mpi_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if not environ.get("MASTER_ADDR"):
        return None
    return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else _PORT


def refuse_one_of_several_machines(environ: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Refuse to run as a single process if environment variables show that the job is meant for several processes.

    Args:
        environ: environment variables of a process without a rank.
        arguments: command-line arguments of ``d9d``, for the suggested command.

    Returns:
        A warning if the variables do not tell whether the job has several machines; else ``None``.

    Raises:
        JobError: the job is meant for several processes; the text has the command to start on each machine.
    """
    command = shlex.join(["-m", "d9d_core", *arguments])
    gpus = '"$SKYPILOT_NUM_GPUS_PER_NODE"' if _above_one(environ, "SKYPILOT_NUM_GPUS_PER_NODE", least=1) else "1"
    if any(_above_one(environ, name) for name in ("PET_NNODES", "PET_NPROC_PER_NODE")):
        pet = [f"{name}={environ[name]}" for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if environ.get(name)]
        raise JobError(_one_of_several(" and ".join(pet), f"torchrun {command}"))
    if _above_one(environ, "SKYPILOT_NUM_NODES"):
        host = next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), "FIRST_OF_SKYPILOT_NODE_IPS")
        options = f'--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node {gpus}'
        options += f" --master-addr {host} --master-port {_PORT}"
        said = f"SKYPILOT_NUM_NODES={environ['SKYPILOT_NUM_NODES']}"
        raise JobError(_one_of_several(said, f"torchrun {options} {command}"))
    index = environ.get("JOB_COMPLETION_INDEX", "").strip()
    if index == "0":
        return "warning: JOB_COMPLETION_INDEX is 0: if this Kubernetes job has several pods, start torchrun in each"
    if index.isdecimal():
        options = '--nnodes PODS --node-rank "$JOB_COMPLETION_INDEX" --nproc-per-node gpu'
        options += f" --master-addr HOST_OF_POD_0 --master-port {_PORT}"
        raise JobError(_one_of_several(f"JOB_COMPLETION_INDEX={index}", f"torchrun {options} {command}"))
    return None


def forget_launchers(environ: MutableMapping[str, str]) -> None:
    """Remove the environment variables by which launchers mark a process, or its machine, as one of several."""
    for name in _STARTED:
        environ.pop(name, None)


def _one_of_several(said: str, command: str) -> str:
    return (
        f"{said}: the job is meant for several processes, but this command is one process that would run the whole "
        "job alone. Start on each machine:\n"
        f"    {command}\n"
        f"{_LEFT}"
    )


def _above_one(environ: Mapping[str, str], name: str, least: int = 2) -> bool:
    """Whether a variable is a number of at least ``least``, or a text that may stand for such a number (``gpu``)."""
    text = environ.get(name, "").strip()
    number = text.rpartition(":")[2]
    return int(number) >= least if number.isdecimal() else text not in ("", "auto", "cpu")


def _slurm(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    _need(environ, _SLURM, "srun sets all of them")
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _need(environ, (total,), "srun sets it")
    return (
        _number(environ, "SLURM_PROCID"),
        _number(environ, total),
        _number(environ, "SLURM_LOCALID"),
        _slurm_local_size(environ, _number(environ, total)),
    )


def _nodes(
    environ: Mapping[str, str], env: tuple[int, int, int, int], rank: str, counts: Iterable[str]
) -> tuple[int, int]:
    """Number of this machine and number of machines, from variables.

    Without these variables, all machines are assumed to have equal numbers of processes.

    Args:
        environ: environment variables.
        env: rank, world size, local rank and local world size.
        rank: name of the variable with the number of this machine.
        counts: names of the variables with the number of machines; the first one that is set is used.
    """
    given = [name for name in counts if environ.get(name)]
    if environ.get(rank) and given:
        return _number(environ, rank), _number(environ, given[0])
    return env[0] // max(1, env[3]), max(1, -(-env[1] // max(1, env[3])))


def _slurm_local_size(environ: Mapping[str, str], world_size: int) -> int:
    # Prefer the variables of the step: a step may use only a part of the allocation.
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            counts, node = expand_counts(environ[name]), _number(environ, "SLURM_NODEID")
            if node >= len(counts):
                raise JobError(f"SLURM_NODEID {node} does not exist in {name}={environ[name]}")
            return counts[node]
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(world_size, _number(environ, "SLURM_NTASKS_PER_NODE"))
    raise JobError("SLURM_PROCID is set, but neither SLURM_TASKS_PER_NODE nor SLURM_NTASKS_PER_NODE is; srun sets one")


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    if "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
    else:
        names = [name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if name in environ]
        _need(environ, names[:1] or ("SLURM_JOB_NODELIST",), "srun sets it; or set MASTER_ADDR")
        host = expand_hosts(environ[names[0]])[0]
    if "MASTER_PORT" in environ:
        return host, _number(environ, "MASTER_PORT")
    # The port is equal on all ranks, differs between jobs that share a node, and is no ephemeral port.
    return host, 12_000 + _number(environ, "SLURM_JOB_ID") % 16_000


def _need(environ: Mapping[str, str], names: Sequence[str], hint: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        known = dict.fromkeys((*names, *_TORCHRUN, *_SLURM, "MASTER_ADDR", "MASTER_PORT"))
        present = [name for name in known if environ.get(name)]
        raise JobError(f"{_list(present)} set, but {_list(missing)} not; {hint}; {_LEFT}")


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names) or 'nothing'} {'are' if len(names) > 1 else 'is'}"


def _number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d+", environ[name].strip()):
        raise JobError(f"{name}: '{environ[name]}' is not a number of 0 or more")
    return int(environ[name])
