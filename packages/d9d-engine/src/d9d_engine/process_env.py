"""Environment variables of launchers: which process of a job this one is. Imports no torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from d9d_core.errors import JobError

Launcher = Literal["torchrun", "slurm"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: One entry of a node list, such as ``rack[1-2]node[01-03,7]``.
_HOSTS = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True)
class ProcessEnv:
    """Process among all processes of a job; by default the only one.

    Attributes:
        rank: number of this process.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        local_world_size: number of processes on its machine.
        node: name of its machine.
        launcher: who started it; ``None`` if nobody started several.
        master: host and port where ranks meet; ``None`` if the launcher named none.
        node_rank: number of its machine.
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
        """Read torchrun's variables, else those of a Slurm step, else assume one process.

        A batch script itself is not a step: what it starts without ``srun`` is one process, whatever was allocated.

        Raises:
            JobError: variables are missing, malformed or contradict each other.
        """
        node = environ.get("SLURMD_NODENAME") or platform.node()
        if any(name in environ for name in _TORCHRUN[:3]):
            env = _torchrun(environ)
            nodes = _nodes(environ, env, "GROUP_RANK", ("GROUP_WORLD_SIZE",))
            return cls(*env, node, "torchrun", _torchrun_master(environ), *nodes)
        if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
            env = _slurm(environ)
            if env[1] > 1:
                nodes = _nodes(environ, env, "SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
                return cls(*env, node, "slurm", _slurm_master(environ), *nodes)
        return cls(node=node)

    @property
    def _source(self) -> str:
        names = {"torchrun": ", ".join(_TORCHRUN), "slurm": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID"}
        return names[self.launcher] if self.launcher else "process environment"


def expand_hosts(text: str) -> list[str]:
    """Expand the hosts of a Slurm node list: ``node[01-03,7],gpu2`` is node01, node02, node03, node7, gpu2.

    Raises:
        JobError: it cannot be read.
    """
    if not re.fullmatch(f"{_HOSTS}(,{_HOSTS})*", text):
        raise JobError(f"SLURM_JOB_NODELIST: '{text}' is not a node list such as node[01-03,7],gpu2")
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
        JobError: it cannot be read.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise JobError(f"SLURM_TASKS_PER_NODE: '{text}' is not a list of counts such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _torchrun(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    _need(environ, _TORCHRUN, "torchrun sets all of them")
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in _TORCHRUN)
    return rank, world_size, local_rank, local_world_size


def _torchrun_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if not any(name in environ for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    _need(environ, ("MASTER_ADDR", "MASTER_PORT"), "torchrun sets both")
    return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")


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
    """Number of this machine, and of machines; where the launcher names none, machines are taken to be alike.

    Args:
        environ: environment variables.
        env: rank, number of processes, local rank and number of processes on this machine.
        rank: variable with the number of the machine.
        counts: variables with the number of machines; the first one that is set counts.
    """
    given = [name for name in counts if environ.get(name)]
    if environ.get(rank) and given:
        return _number(environ, rank), _number(environ, given[0])
    return env[0] // max(1, env[3]), max(1, -(-env[1] // max(1, env[3])))


def _slurm_local_size(environ: Mapping[str, str], world_size: int) -> int:
    # The step's own count: those of the allocation tell nothing about a step that uses a part of it.
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
    # Equal on all ranks, different for jobs that share a node, and outside the range of ephemeral ports.
    return host, 12_000 + _number(environ, "SLURM_JOB_ID") % 16_000


def _need(environ: Mapping[str, str], names: Iterable[str], hint: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in (*_TORCHRUN, *_SLURM, "MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
        raise JobError(f"{_list(present)} set, but {_list(missing)} not; {hint}")


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names) or 'nothing'} {'are' if len(names) > 1 else 'is'}"


def _number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d+", environ[name].strip()):
        raise JobError(f"{name}: '{environ[name]}' is not a number of 0 or more")
    return int(environ[name])
