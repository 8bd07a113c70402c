"""``d9d train --nproc``: starts the processes that torchrun would start, and prints one cause at the end.

They all are on this machine, and nothing listens where another one could reach it: the store in which ranks meet is
bound to the loopback, and so are the listeners of gloo and NCCL unless the user names another interface. torch's
elastic agent would bind its stores to all interfaces, and unpickles what it finds in them.
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

from d9d_core.untrusted import visible

from d9d_engine.launch.ranks import Ended, Rank, Ranks
from d9d_engine.run.interrupt import Interrupts, stop_signals
from d9d_engine.supervision.failure import Failure

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of processes by the agent on this machine, and of all again after a failure.

    Attributes:
        arguments: of the Python interpreter.
        processes: how many.
        restarts: how often to start all again after a failure.
        name_of: rank -> how messages call it.
        patience: seconds until the last process must have ended after the first one did well.
    """

    arguments: Sequence[str]
    processes: int
    restarts: int
    name_of: Callable[[int], str]
    patience: float = 600.0

    def run(self, interrupts: Interrupts | None = None) -> int:
        """Run until all processes have ended; prints why if they failed.

        Args:
            interrupts: what asked this process to stop before this call.

        Returns:
            The exit status: of the process that failed first; 0 if SIGTERM ended the run, 130 if Ctrl-C ended its
            start-up.
        """
        with signals_received() as signals:
            if interrupts is not None and interrupts.requested:
                signals.append(signal.Signals[interrupts.requested])
            for attempt in range(self.restarts + 1):
                ended = run_ranks(self.arguments, self.processes, signals, self.patience)
                failure = cause(ended.failed, self.name_of) if ended.failed else None
                if ended.asked is not None:
                    return _stopped(ended, failure, first=attempt == 0)
                if failure is None:
                    return 0
                _say(failure.text)
                # Exit status 2 is a mistake in the job or its surroundings, which another attempt repeats.
                if attempt == self.restarts or failure.exit_code == 2:
                    return failure.exit_code
                _say(f"starting all {self.processes} processes again (restart {attempt + 1} of {self.restarts})")
        raise AssertionError("the last attempt returns")


def run_ranks(
    arguments: Sequence[str],
    processes: int,
    signals: list[int],
    patience: float,
    environ: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
) -> Ended:
    """Run processes as torchrun's agent does, with its variables, on this machine until all have ended.

    Args:
        arguments: of the Python interpreter.
        processes: how many.
        signals: numbers of the signals that this process received; see :func:`signals_received`.
        patience: seconds until the last one must have ended after the first one did well.
        environ: environment variables; by default, those of this process.
        output: where they print; by default, where this process prints.
    """
    store = _loopback_store()
    common = _environment(processes) | dict(os.environ if environ is None else environ)
    common |= {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    each = [{**common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return Ranks(arguments, each, output).wait(signals, patience)


def run_module(
    module: str,
    arguments: Sequence[str],
    processes: int,
    environ: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    patience: float = 600.0,
) -> Failure | None:
    """Run a module in processes as torchrun's agent does, with its variables, out of reach of other machines.

    Args:
        module: name for ``python -m``.
        arguments: of the module.
        processes: how many.
        environ: environment variables; by default, those of this process.
        output: where they print; by default, where this process prints.
        patience: seconds until the last one must have ended after the first one did well.

    Returns:
        Why the process that failed first did, or ``None``.

    Raises:
        KeyboardInterrupt: this process was asked to stop; all others have ended.
    """
    with signals_received() as signals:
        ended = run_ranks(("-m", module, *arguments), processes, signals, patience, environ, output)
    if ended.asked is not None:
        raise KeyboardInterrupt
    return cause(ended.failed, lambda rank: f"rank {rank}") if ended.failed else None


@contextmanager
def signals_received() -> Iterator[list[int]]:
    """Signals that ask the agent of launched processes to stop: their numbers, as they arrive within the block.

    Outside the main thread signals cannot be caught, and none arrives.
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
    """Cause of a launch's end among failed processes: the failure that led to the others.

    Args:
        failed: at least one, without those that the launcher ended.
        name_of: rank -> how messages call it.
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
    return Failure(f"{who} ended with exit status {code}, without an error of its own", code)


def _stopped(ended: Ended, failure: Failure | None, first: bool) -> int:
    """Exit status of a run that was asked to stop; says what became of it unless the processes did."""
    if ended.training and not ended.insisted:
        if failure is not None:
            _say(failure.text)
        return 0 if failure is None else failure.exit_code
    # The processes of an earlier attempt may have trained.
    early = first and not ended.training
    if ended.asked == "SIGINT" or ended.training:
        _say("interrupted: during start-up; nothing was trained" if early else "interrupted")
        return 130
    _say(f"{ended.asked}: stopped during start-up" + ("; nothing was trained" if early else ""))
    return 0


def _loopback_store() -> Any:
    """Store in which ranks meet, served by this process to this machine alone."""
    from torch import distributed as dist

    listening = socket.create_server((_LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _environment(processes: int) -> dict[str, str]:
    """Environment of started processes, where the user has set nothing else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    if platform.system() == "Linux":
        # All are on this machine, whose own name may be unknown to it.
        values |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return values


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - its purpose
