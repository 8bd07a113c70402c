"""``d9d train --nproc``: starts the processes that torchrun would start, and prints one cause at the end.

torch's elastic agent starts and watches them. Restarts are made here, one agent after the other: it has no way to say
why it restarts, and would repeat a job whose error cannot go away.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from d9d_engine.launch.channel import VARIABLE, Channel
from d9d_engine.launch.process import ENDED
from d9d_engine.supervision.failure import Failure

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

#: Signals that processes die of by themselves. SIGTERM is the agent's way to end those that are left.
_OWN_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
#: The agent kills what is left 30 s after a failure; a process that was killed sooner was not killed by it.
_OWN_KILL_SECONDS = 20
#: The user interrupted before every process could be asked to stop, so none was as far as the first step.
_BEFORE_PROCESSES = Failure("interrupted", 130)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of processes on this machine by an elastic agent.

    Attributes:
        arguments: of the Python interpreter.
        processes: how many.
        restarts: how often to start all again after a failure.
        name_of: rank -> how messages call it.
    """

    arguments: Sequence[str]
    processes: int
    restarts: int
    name_of: Callable[[int], str]

    def run(self) -> int:
        """Run until all processes have ended; prints why if they failed.

        Returns:
            The exit status: of the process that failed first, or 130 if the user ended the start-up.
        """
        with tempfile.TemporaryDirectory(prefix="d9d-launch-") as directory:
            for attempt in range(self.restarts + 1):
                channel = Channel(Path(directory) / str(attempt))
                channel.directory.mkdir()
                failure = self._attempt(channel)
                if failure is None:
                    return 0
                if channel.stopping:
                    # The processes of an earlier attempt may have trained.
                    early = attempt == 0 and failure is _BEFORE_PROCESSES
                    _say("interrupted: during start-up; nothing was trained" if early else "interrupted")
                    return 130
                _say(failure.text)
                # Exit status 2 is a mistake in the job or its surroundings, which another attempt repeats.
                if attempt == self.restarts or failure.exit_code == 2:
                    return failure.exit_code
                _say(f"starting all {self.processes} processes again (restart {attempt + 1} of {self.restarts})")
        raise AssertionError("the last attempt returns")

    def _attempt(self, channel: Channel) -> Failure | None:
        try:
            with self._signals_passed_on(channel), _environment(channel, self.processes), _quiet_agent():
                return _run_agent(self, channel)
        except KeyboardInterrupt:
            return _BEFORE_PROCESSES

    @contextmanager
    def _signals_passed_on(self, channel: Channel) -> Iterator[None]:
        asked = 0

        def ask(number: int, _frame: FrameType | None) -> None:
            nonlocal asked
            asked += 1
            gentle = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            if not channel.stop(gentle if asked < 3 else signal.SIGKILL, self.processes):
                raise KeyboardInterrupt  # nothing runs that could be saved; the agent ends what there is

        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            wanted.append(signal.SIGHUP)
        previous = {number: signal.signal(number, ask) for number in wanted}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _run_agent(launch: Launch, channel: Channel) -> Failure | None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(channel.directory)),
        signals_to_handle="SIGQUIT",  # the others are passed on by ourselves
    )
    try:
        elastic_launch(config, sys.executable)(*launch.arguments)
    except ChildFailedError as error:
        return cause(error.failures, launch.name_of)
    return None


def cause(failures: Mapping[int, ProcessFailure], name_of: Callable[[int], str]) -> Failure:
    """Cause among the failures that the agent saw: the one that led to the others.

    Args:
        failures: rank -> what the agent knows about it.
        name_of: rank -> how messages call it.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, tuple[ProcessFailure, Failure | None]]) -> tuple[int, int]:
        _, (process, told) = item
        signalled = -process.exitcode in _OWN_SIGNALS and process.timestamp - first < _OWN_KILL_SECONDS
        told_nothing = process.error_file_data.get("message") == "<NONE>"
        if told is not None:
            guilt = 3 if told.second_hand else 0
        elif signalled:
            guilt = 1
        elif told_nothing and process.exitcode > 0 and process.exitcode != ENDED:
            guilt = 2
        else:
            guilt = 4
        return guilt, process.timestamp

    found = {rank: (process, Failure.read(process.error_file_data)) for rank, process in failures.items()}
    rank, (process, told) = min(found.items(), key=order)
    if told is not None:
        return told
    who = f"{name_of(rank)} on {platform.node()}"
    if process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return Failure(f"{who} was killed by {name}{hint}")
    return Failure(f"{who} ended with exit status {process.exitcode}, without an error of its own", process.exitcode)


@contextmanager
def _environment(channel: Channel, processes: int) -> Iterator[None]:
    """Environment of started processes, where the user has set nothing else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    if platform.system() == "Linux":
        values["GLOO_SOCKET_IFNAME"] = "lo"  # all on this machine, whose own name may be unknown to it
    before = dict(os.environ)
    os.environ.update({**values, **before, VARIABLE: str(channel.directory)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's log, which repeats what is printed here, unless LOGLEVEL is set."""
    logger: Any = logging.getLogger("torch.distributed.elastic")
    silent, before = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = before


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - its purpose
