"""Processes that a launcher started: what it hears from them, and their end."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from d9d_core.cli.ending import PATIENCE
from d9d_core.interpreter import python_command
from d9d_core.untrusted import visible

from d9d_engine.launch.link import VARIABLE, Link
from d9d_engine.run.interrupt import stop_signals
from d9d_engine.supervision.failure import Failure

#: How long processes may go on after another one failed, to find out by themselves and tell what they know.
_LAST_SECONDS = 2.0
#: How long a process may take to end after it was done. It ends itself, and says what kept it, before that.
_DONE_SECONDS = PATIENCE + 30
#: How often to look whether a process has ended.
_PAUSE = 0.05


@dataclass
class Rank:
    """Rank that a launcher started: its process, and what is known about it.

    Attributes:
        number: its rank.
        process: as the system knows it.
        link: to the process.
        training: it has something to save.
        done: it has done all it had to.
        done_at: when it told so, by the clock ``time.monotonic``.
        failure: why it fails, in its own words.
        echoes: it fails because another one did.
        exit_code: how it ended; minus the signal's number if one killed it.
        ended: place in the order in which processes ended.
    """

    number: int
    process: subprocess.Popen[bytes]
    link: Link
    training: bool = False
    done: bool = False
    done_at: float = float("inf")
    failure: Failure | None = None
    echoes: bool = False
    exit_code: int | None = None
    ended: int = 0

    def hear(self) -> str | None:
        """Read what the process tells; returns the name of a signal if one asked it to stop."""
        asked = None
        for message in self.link.receive():
            self.training |= "training" in message
            if "done" in message and not self.done:
                self.done, self.done_at = True, time.monotonic()
            asked = message.get("asked", asked)
            if "failure" in message:
                told = message["failure"]
                self.failure, self.echoes = Failure(**told) if told else None, told is None
        return asked


@dataclass(frozen=True, slots=True)
class Ended:
    """End of all processes.

    Attributes:
        failed: those that failed, without those that had to be ended for it.
        asked: name of the signal that asked to stop, or ``None``.
        training: whether there was something to save.
        insisted: whether they were not given the time for it.
    """

    failed: Sequence[Rank]
    asked: str | None
    training: bool
    insisted: bool


class Ranks:
    """Ranks that a launcher started in one attempt, each a process.

    Args:
        arguments: of the Python interpreter.
        environments: of each process; their number is that of the processes.
        output: where they print; by default, where this process prints.
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

        A request to stop reaches all of them. If one has something to save, they get the time; else they are ended.

        Args:
            signals: numbers of the signals that this process received; a handler may add to it meanwhile.
            patience: seconds until the last one must have ended after the first one did well.
        """
        asked: str | None = None
        heeded, deadline, failing, insisted = 0, float("inf"), False, False
        while any(rank.exit_code is None for rank in self.ranks):
            told = self._hear(_PAUSE)
            told = self._note_ends() or told
            ended = [rank for rank in self.ranks if rank.exit_code is not None]
            if asked is None and (asked := _name(signals[0]) if signals else told):
                self._ask(asked)
            # The first one may have reached other processes, too: it is the same request.
            for times in range(max(1, heeded), len(signals)):
                if self._insist(signals[times], times):
                    failing, insisted, deadline = True, True, time.monotonic() + _LAST_SECONDS
            heeded = len(signals)
            now = time.monotonic()
            if not failing and any(rank.exit_code and not rank.done for rank in ended):
                failing, deadline = True, now + _LAST_SECONDS
            elif ended and deadline == float("inf"):
                deadline = now + patience
            self._end_the_done(now)
            if now > deadline:
                self._give_up(failing, patience)
                break
        return self._close(asked, insisted)

    def kill(self) -> None:
        """End all processes at once."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            rank.link.connection.close()
        self._selector.close()

    def _start(self, number: int, command: list[str], environ: Mapping[str, str], output: IO[str] | None) -> None:
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command,
                env={**environ, VARIABLE: str(there.fileno())},
                pass_fds=[there.fileno()],
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process only, which asks the others
            )
        rank = Rank(number, process, Link(here))
        self.ranks.append(rank)
        self._selector.register(here, selectors.EVENT_READ, rank)

    def _hear(self, pause: float) -> str | None:
        told = None
        for key, _ in self._selector.select(pause):
            try:
                told = key.data.hear() or told
            except EOFError:
                self._selector.unregister(key.fileobj)
        if not self._selector.get_map():
            time.sleep(pause)  # processes that take no part in this
        return told

    def _note_ends(self) -> str | None:
        """Note which processes have ended; returns the signal that asked the first to stop before it could tell."""
        told = None
        for rank in self.ranks:
            if rank.exit_code is not None or (code := rank.process.poll()) is None:
                continue
            told = self._hear(0) or told  # its last words
            rank.exit_code = code
            rank.ended = sum(one.exit_code is not None for one in self.ranks)
            if -code in (signal.SIGINT, *stop_signals()) and not self._training():
                told = told or _name(-code)
        return told

    def _training(self) -> bool:
        return any(rank.training for rank in self.ranks)

    def _ask(self, name: str) -> None:
        self._hear(0)
        for rank in self.ranks:
            if not self._training():
                rank.process.kill()
            else:
                rank.link.send(stop=name)

    def _insist(self, number: int, before: int) -> bool:
        """Pass on another Ctrl-C, or kill at the third request; returns whether processes get no more time."""
        for rank in self.ranks:
            if rank.exit_code is None and before > 1:
                rank.process.kill()
            elif rank.exit_code is None and number == signal.SIGINT:
                rank.process.send_signal(number)
        return number == signal.SIGINT or before > 1

    def _end_the_done(self, now: float) -> None:
        """End the processes that were done long ago, and that their own watch has not ended either."""
        for rank in self.ranks:
            if rank.exit_code is None and now > rank.done_at + _DONE_SECONDS:
                rank.done_at = float("inf")
                text = f"warning: rank {rank.number} was done {_DONE_SECONDS:g} s ago, but did not end; it was killed"
                print(visible(text), file=sys.stderr, flush=True)  # noqa: T201
                rank.process.kill()

    def _give_up(self, failing: bool, patience: float) -> None:
        for rank in self.ranks:
            if rank.exit_code is None and not failing:
                rank.done = False
                text = (
                    f"error: rank {rank.number} did not end within {patience:g} s (timeouts.startup) after another one"
                )
                rank.failure = Failure(text)

    def _close(self, asked: str | None, insisted: bool) -> Ended:
        self.kill()
        failed = [rank for rank in self.ranks if not rank.done and (rank.exit_code or rank.failure)]
        return Ended(failed, asked, self._training(), insisted)


def _name(number: int) -> str:
    return signal.Signals(number).name
