"""``d9d train --nproc``: starts a job's processes like torchrun, and prints a single cause of a failure.

All processes are on this machine, and nothing listens on external interfaces: the store for the rendezvous is bound to
the loopback, and so are gloo and NCCL unless the user names an interface. torch's elastic agent would bind its stores
to all interfaces, and it unpickles their contents.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from d9d_core.errors import JobError
from d9d_core.untrusted import visible

from d9d_engine.launch.ranks import Ended, Rank, Ranks
from d9d_engine.run.interrupt import STOPPED, Interrupts, stop_signals
from d9d_engine.supervision.failure import Failure, what_happened

_LOOPBACK = "127.0.0.1"
_TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
#: Port of the rendezvous of several machines, as in torch's examples.
PORT = 29_500


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that share a job; on each of them, a launcher starts the same number of processes.

    Attributes:
        count: number of machines, two or more.
        rank: number of this machine, from 0.
        host: address at which rank 0, on machine 0, serves the store for the rendezvous.
        port: port of the store.

    Raises:
        JobError: a value is out of range, or the host is empty.
    """

    count: int
    rank: int
    host: str
    port: int = PORT

    def __post_init__(self) -> None:
        if self.count < 2:
            raise JobError(f"--nodes: {self.count} is less than two machines; leave out --nodes for one machine")
        if not 0 <= self.rank < self.count:
            raise JobError(
                f"--node-rank: {self.rank} does not exist; give 0 to {self.count - 1}, a different one on each machine"
            )
        if not self.host or not 0 < self.port < 65_536:
            raise JobError(f"--master: '{self.host}:{self.port}' is not HOST or HOST:PORT; name machine 0")

    def environment(self, processes: int, rank: int) -> dict[str, str]:
        """Variables, as torchrun sets them, of a process of this machine.

        Args:
            processes: number of processes on each machine.
            rank: number of the process on this machine.
        """
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "GROUP_RANK": str(self.rank),
            "GROUP_WORLD_SIZE": str(self.count),
            "WORLD_SIZE": str(self.count * processes),
            "RANK": str(self.rank * processes + rank),
            "LOCAL_WORLD_SIZE": str(processes),
            "LOCAL_RANK": str(rank),
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a job's processes on this machine, with restarts after a failure.

    Attributes:
        arguments: arguments of the Python interpreter.
        processes: number of processes.
        restarts: largest number of restarts of all processes after failures.
        name_of: rank -> name of the rank in messages.
        patience: seconds within which the last process must end after the first process ended without a failure.
        environ: environment variables to extend; by default, the variables of this process.
        machines: machines that share the job; ``None`` if all processes are on this one.
    """

    arguments: Sequence[str]
    processes: int
    restarts: int
    name_of: Callable[[int], str]
    patience: float = 600.0
    environ: Mapping[str, str] | None = None
    machines: Machines | None = None

    def run(self, interrupts: Interrupts | None = None) -> int:
        """Run until all processes have ended; prints the cause of a failure.

        Args:
            interrupts: stop requests, which may have arrived before this call.

        Returns:
            Exit status: 0 after success; after a failure, the status of the process that failed first; :data:`STOPPED`
            after a stop request; 130 if Ctrl-C ended the start-up, or if the stop request was repeated.
        """
        with signals_received() as signals:
            if interrupts is not None and interrupts.requested:
                signals.append(signal.Signals[interrupts.requested])
            for attempt in range(self.restarts + 1):
                ended = run_ranks(
                    self.arguments, self.processes, signals, self.patience, self.environ, machines=self.machines
                )
                failure = cause(ended.failed, self._name_of) if ended.failed else None
                if ended.asked is not None:
                    return _stopped(ended, failure, first=attempt == 0)
                if failure is None:
                    return STOPPED if ended.stopped else 0
                _say(failure.text)
                # Exit status 2 means an error in the job or its environment, which a restart would repeat.
                if attempt == self.restarts or failure.exit_code == 2:
                    return failure.exit_code
                _say(f"starting all {self.processes} processes again (restart {attempt + 1} of {self.restarts})")
        raise AssertionError("the last attempt returns")

    def _name_of(self, number: int) -> str:
        """Name of a process of this machine."""
        before = 0 if self.machines is None else self.machines.rank * self.processes
        return self.name_of(before + number)


def run_ranks(
    arguments: Sequence[str],
    processes: int,
    signals: list[int],
    patience: float,
    environ: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    machines: Machines | None = None,
) -> Ended:
    """Run processes on this machine with torchrun's environment variables, until all have ended.

    Args:
        arguments: arguments of the Python interpreter.
        processes: number of processes.
        signals: signals that this process has received; see :func:`signals_received`.
        patience: seconds within which the last process must end after the first process ended without a failure.
        environ: environment variables; by default, the variables of this process.
        output: file for the output of the processes; by default, the output of this process.
        machines: machines that share the job; ``None`` if all processes are on this one.
    """
    with rank_environments(processes, environ, machines) as each:
        return Ranks(arguments, each, output).wait(signals, patience)


@contextmanager
def rank_environments(
    processes: int, environ: Mapping[str, str] | None = None, machines: Machines | None = None
) -> Iterator[Sequence[dict[str, str]]]:
    """Yield torchrun's environment variables for each rank, with a store that this process serves inside the block.

    Args:
        processes: number of processes on this machine.
        environ: environment variables to extend; by default, the variables of this process.
        machines: machines that share the job; then rank 0, on the first machine, serves the store. ``None`` if all
            processes are on this machine.
    """
    given = dict(os.environ if environ is None else environ)
    if machines is not None:
        own = {name: _environment(processes)[name] for name in ("OMP_NUM_THREADS", _TORCH_LOG)} | given
        own.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        yield [{**own, **machines.environment(processes, rank)} for rank in range(processes)]
        return
    store = _loopback_store()  # serves until it is deleted
    common = _environment(processes) | given
    common |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    yield [{**common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def run_module(
    module: str,
    arguments: Sequence[str],
    processes: int,
    environ: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    patience: float = 600.0,
) -> Failure | None:
    """Run a module in several processes with torchrun's environment variables, unreachable from other machines.

    Args:
        module: name for ``python -m``.
        arguments: arguments of the module.
        processes: number of processes.
        environ: environment variables; by default, the variables of this process.
        output: file for the output of the processes; by default, the output of this process.
        patience: seconds within which the last process must end after the first process ended without a failure.

    Returns:
        Cause of the first failure, or ``None``.

    Raises:
        KeyboardInterrupt: this process was asked to stop; all processes that it started have ended.
    """
    with signals_received() as signals:
        ended = run_ranks(("-m", module, *arguments), processes, signals, patience, environ, output)
    if ended.asked is not None:
        raise KeyboardInterrupt
    return cause(ended.failed, lambda rank: f"rank {rank}") if ended.failed else None


@contextmanager
def signals_received() -> Iterator[list[int]]:
    """Yield a list that collects the numbers of stop signals as they arrive inside the block.

    Signals can only be caught in the main thread; in other threads the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, *stop_signals())}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def cause(failed: Sequence[Rank], name_of: Callable[[int], str]) -> Failure:
    """Choose the original failure among the failed processes; the other processes failed as a consequence.

    Args:
        failed: failed processes, at least one; see :attr:`d9d_engine.launch.ranks.Ended.failed`.
        name_of: rank -> name of the rank in messages.
    """

    def order(rank: Rank) -> tuple[int, int]:
        if rank.failure is not None:
            guilt = 3 if rank.failure.second_hand else 0
        elif rank.echoes:
            guilt = 4
        else:
            guilt = 1 if (rank.exit_code or 0) < 0 else 2
        return guilt, rank.ended

    rank = min(failed, key=order)
    if rank.failure is not None:
        return rank.failure
    code = rank.exit_code or 0
    who = f"{name_of(rank.number)} on {platform.node()}"
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return Failure(f"{who} was killed by {name}{hint}")
    if rank.echoes:  # the other rank is on another machine, whose launcher prints its failure
        why = what_happened(rank.echoes)
        return Failure(f"{who} ended with exit status {code}, because {why}; the launcher of that rank says why", code)
    return Failure(f"{who} ended with exit status {code}, without an error of its own", code)


def _stopped(ended: Ended, failure: Failure | None, first: bool) -> int:
    """Exit status of a launch that was asked to stop; prints the outcome unless a process has printed it."""
    if ended.training and not ended.insisted:
        if failure is not None:
            _say(failure.text)
            return failure.exit_code
        return STOPPED if ended.stopped else 0  # a request in the last step changes nothing
    # Only for the first attempt can this function say that nothing was trained: an earlier attempt may have trained.
    early = first and not ended.training
    if ended.asked == "SIGINT" or ended.training:
        _say("interrupted: during start-up; nothing was trained" if early else "interrupted")
        return 130
    _say(f"{ended.asked}: stopped during start-up" + ("; nothing was trained" if early else ""))
    return STOPPED


def _loopback_store() -> Any:
    """Store for the rendezvous, served by this process and reachable from this machine only."""
    from torch import distributed as dist

    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _environment(processes: int) -> dict[str, str]:
    """Environment variables for the started processes; variables that the user sets take precedence."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without ERROR, torch prints a C++ stack when the process that serves the store has ended.
    values = {"OMP_NUM_THREADS": str(max(1, cores // processes)), _TORCH_LOG: "ERROR"}
    if platform.system() == "Linux":
        # All processes are on this machine, whose own host name may not resolve.
        values |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return values


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - console output is the purpose
