"""The launcher's view of a job's processes: reads their messages, and waits for or forces their end."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

from d9d_core.cli.ending import PATIENCE
from d9d_core.interpreter import python_command
from d9d_core.untrusted import visible

from d9d_engine.launch.link import VARIABLE, Link
from d9d_engine.run.interrupt import STOPPED, stop_signals
from d9d_engine.supervision.failure import Failure

#: Seconds that processes may continue after another one failed, to detect and report the failure themselves.
_LAST_SECONDS = 2.0
#: Seconds in which a finished process must exit. Before that, its own watchdog ends it and reports the reason.
_DONE_SECONDS = PATIENCE + 30
#: Seconds between checks whether a process has ended.
_PAUSE = 0.05


@dataclass
class Rank:
    """Launched process of a rank, with its reported state.

    Attributes:
        number: rank.
        process: handle of the process.
        link: link to the process.
        training: whether the process has progress to save.
        done: whether the process has finished its work.
        done_at: time, by ``time.monotonic``, at which the process reported that it had finished.
        failure: failure that the process reported.
        echoes: name of the rank because of whose failure the process failed; empty for a failure of its own.
        exit_code: exit status; minus the signal's number if a signal killed the process.
        ended: place in the order in which processes ended.
    """

    number: int
    process: subprocess.Popen[bytes]
    link: Link
    training: bool = False
    done: bool = False
    done_at: float = float("inf")
    failure: Failure | None = None
    echoes: str = ""
    exit_code: int | None = None
    ended: int = 0

    def hear(self) -> str | None:
        """Read the process's messages; return the name of the signal that it received as a stop request, if any."""
        asked = None
        for message in self.link.receive():
            self.training |= "training" in message
            if "done" in message and not self.done:
                self.done, self.done_at = True, time.monotonic()
            asked = message.get("asked", asked)
            if "failure" in message:
                told = message["failure"]
                self.failure, self.echoes = (Failure(**told), "") if told else (None, message["first"])
        return asked


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a launch attempt, once all its processes have ended.

    Attributes:
        failed: processes that ended with an error or did not end in time. Processes that the launcher killed at the end
            of the attempt, because another process had failed, are left out.
        asked: name of the first signal that asked the launch to stop; ``None`` without a stop request.
        training: whether any process had begun to train, and so had progress to save.
        insisted: whether the user repeated the stop request, so that the launcher did not wait for saves.
        stopped: whether a process saved and ended before its work was complete, because of the stop request.
    """

    failed: Sequence[Rank]
    asked: str | None
    training: bool
    insisted: bool
    stopped: bool = False


class Ranks:
    """Processes of one launch attempt, one for each rank.

    Args:
        arguments: arguments of the Python interpreter.
        environments: environment variables of each process.
        output: file for the output of the processes; by default, the output of this process.
    """

    def __init__(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], output: IO[str] | None = None
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        try:
            for number, environ in enumerate(environments):
                self._start(number, [*python_command(), *arguments], environ, output)
        except BaseException:
            self.kill()
            raise

    def wait(self, signals: list[int], patience: float) -> Ended:
        """Wait until all processes have ended.

        A stop request is sent to all processes. If any process has progress to save, all get time to save; else all are
        killed.

        Args:
            signals: signals that this process has received; a signal handler may append to it.
            patience: seconds within which the last process must end after the first process ended without a failure.
        """
        asked: str | None = None
        heeded, deadline, failing, insisted = 0, float("inf"), False, False
        while any(rank.exit_code is None for rank in self.ranks):
            told = self._read_messages(_PAUSE)
            told = self._note_ends() or told
            ended = [rank for rank in self.ranks if rank.exit_code is not None]
            if asked is None and (asked := _name(signals[0]) if signals else told):
                self._ask(asked)
            # The first signal may also have reached other processes, so it counts as one request.
            for times in range(max(1, heeded), len(signals)):
                if self._repeat_request(signals[times], times):
                    failing, insisted, deadline = True, True, time.monotonic() + _LAST_SECONDS
            heeded = len(signals)
            now = time.monotonic()
            if not failing and any(rank.exit_code and not rank.done for rank in ended):
                failing, deadline = True, now + _LAST_SECONDS
            elif ended and deadline == float("inf"):
                deadline = now + patience
            self._kill_lingering(now)
            if now > deadline:
                self._give_up(failing, patience)
                break
        return self._close(asked, insisted)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            rank.link.connection.close()
        self._selector.close()

    def _start(self, number: int, command: list[str], environ: Mapping[str, str], output: IO[str] | None) -> None:
        here, there = socket.socketpair()
        with there, ExitStack() as undo:
            undo.callback(here.close)
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command,
                env={**environ, VARIABLE: str(there.fileno())},
                pass_fds=[there.fileno()],
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only this process, which asks the others
            )
            undo.pop_all()
        rank = Rank(number, process, Link(here))
        self.ranks.append(rank)
        self._selector.register(here, selectors.EVENT_READ, rank)

    def _read_messages(self, pause: float) -> str | None:
        told = None
        for key, _ in self._selector.select(pause):
            try:
                told = key.data.hear() or told
            except EOFError:
                self._selector.unregister(key.fileobj)
        if not self._selector.get_map():
            time.sleep(pause)  # the links of all processes are closed
        return told

    def _note_ends(self) -> str | None:
        """Record ended processes; return the name of a stop signal that they reported, or that ended one of them.

        A signal that ended a process counts only if no process had progress to save. ``None`` if there is no signal.
        """
        told = None
        for rank in self.ranks:
            if rank.exit_code is not None or (code := rank.process.poll()) is None:
                continue
            told = self._read_messages(0) or told  # messages sent before the end
            rank.exit_code = code
            rank.ended = sum(one.exit_code is not None for one in self.ranks)
            if -code in (signal.SIGINT, *stop_signals()) and not self._training():
                told = told or _name(-code)
        return told

    def _training(self) -> bool:
        return any(rank.training for rank in self.ranks)

    def _ask(self, name: str) -> None:
        self._read_messages(0)
        for rank in self.ranks:
            if not self._training():
                rank.process.kill()
            else:
                rank.link.send(stop=name)

    def _repeat_request(self, number: int, before: int) -> bool:
        """Forward a second Ctrl-C to all processes, or kill them at a third request.

        Args:
            number: number of the signal that repeats the request.
            before: number of earlier requests.

        Returns:
            Whether the launcher no longer waits for saves.
        """
        for rank in self.ranks:
            if rank.exit_code is None and before > 1:
                rank.process.kill()
            elif rank.exit_code is None and number == signal.SIGINT:
                rank.process.send_signal(number)
        return number == signal.SIGINT or before > 1

    def _kill_lingering(self, now: float) -> None:
        """Kill finished processes that have neither exited nor been ended by their own watchdog."""
        for rank in self.ranks:
            if rank.exit_code is None and now > rank.done_at + _DONE_SECONDS:
                rank.done_at = float("inf")
                text = f"warning: rank {rank.number} has been done for {_DONE_SECONDS:g} s, but did not exit; killed it"
                print(visible(text), file=sys.stderr, flush=True)  # noqa: T201
                rank.process.kill()

    def _give_up(self, failing: bool, patience: float) -> None:
        for rank in self.ranks:
            if rank.exit_code is None and not failing:
                rank.done = False
                text = (
                    f"error: rank {rank.number} did not end within {patience:g} s (timeouts.startup) after another rank"
                )
                rank.failure = Failure(text)

    def _close(self, asked: str | None, insisted: bool) -> Ended:
        self.kill()
        failed = [rank for rank in self.ranks if not rank.done and (rank.exit_code or rank.failure)]
        stopped = any(rank.done and rank.exit_code == STOPPED for rank in self.ranks)
        return Ended(failed, asked, self._training(), insisted, stopped)


def _name(number: int) -> str:
    return signal.Signals(number).name
