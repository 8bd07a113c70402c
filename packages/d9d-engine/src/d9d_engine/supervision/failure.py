"""Failure reports of ranks: the user reads the cause once. Imports no torch.

If a launcher waits for the process, the report goes to the launcher, which prints it when all processes have ended:
over its link to ``d9d train --nproc``, or in the error file of torchrun's elastic agent. Otherwise the rank prints the
report. Ranks that fail because of another rank's failure print nothing.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from d9d_core.errors import D9dError, TrainingError
from d9d_core.failures import describe
from d9d_core.untrusted import visible
from d9d_weights.files.atomic import write_text

__all__ = ["Failure", "FailureReporter", "Listener"]

#: Messages of a broken connection to another rank, which may have caused the failure.
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo/|nccl|timed out", re.IGNORECASE)
#: Predicate of the headline of a failure that another rank may have caused; follows the name of the failed rank.
_LOST = (
    "lost its connection to another rank, which may have been killed without a message of its own; the launcher's "
    "lines or the system's log may say why"
)


class OtherRankError(TrainingError):
    """The run failed on another rank, which reports the cause; this rank ends with the exit status of that failure.

    Args:
        who: rank and machine that failed.
        text: error of that rank, in one line.
        exit_code: exit status of that rank.
    """

    def __init__(self, who: str, text: str, exit_code: int) -> None:
        super().__init__(f"{who}: {text}")
        self.who = who
        self.exit_code = exit_code


def headline(error: BaseException) -> str:
    """Text of an exception in one line: the first line of its message, with its type unless d9d raised it."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, D9dError) else f"{type(error).__name__}: {first}".rstrip(": ")


#: Suffix of the name of the rank that ended first, if it did not fail but ended by Ctrl-C.
INTERRUPTED = "was interrupted"


def what_happened(first: str) -> str:
    """Clause about the rank that ended first and made others end: ``NAME failed`` or ``NAME was interrupted``."""
    return first if first.endswith(INTERRUPTED) else f"{first} failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a rank, as reported.

    Attributes:
        text: text for the user.
        exit_code: exit status of the process.
        second_hand: whether the failure looks like a consequence of another rank's failure.
    """

    text: str
    exit_code: int = 1
    second_hand: bool = False

    @classmethod
    def of(cls, error: BaseException, who: str | None = None, hide: Collection[str] = ()) -> Failure:
        """Make the failure report of an exception: the message of a D9dError, the traceback of any other exception.

        Args:
            error: exception.
            who: rank and machine, for a headline above a traceback; no headline by default.
            hide: source files whose frames are left out at the beginning of a traceback.
        """
        if isinstance(error, D9dError):
            return cls(describe(error), error.exit_code, isinstance(error, OtherRankError))
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in hide:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        broken = isinstance(error, RuntimeError | OSError) and bool(_BROKEN.search(str(error)))
        if who is not None:
            text = f"{who} {_LOST if broken else 'failed'}:\n{text}"
        return cls(text, 1, broken)


class Listener(Protocol):
    """Receiver of a process's failure, such as its launcher."""

    def failed(self, failure: Failure) -> None:
        """Report the failure of this process; a later report replaces an earlier one."""
        ...

    def echoes(self, first: str) -> None:
        """Report that this process fails because the rank named ``first`` failed."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """Error file of a rank for torch's elastic agent, from ``TORCHELASTIC_ERROR_FILE``.

    Attributes:
        path: path of the file.
    """

    path: Path

    def failed(self, failure: Failure) -> None:
        self._replace(failure.text, time.time())

    def echoes(self, first: str) -> None:
        """Write a failure with a late time, so that the agent reports the rank that failed first."""
        self._replace(f"stopped because {what_happened(first)}", time.time() + 1)

    def _replace(self, text: str, when: float) -> None:
        headline = text.strip().rpartition("\n")[2]
        extra = {"py_callstack": text, "timestamp": str(int(when))}
        # Write atomically: the process may be killed while it writes, and a partial file would hide the cause.
        write_text(self.path, json.dumps({"message": {"message": headline, "extraInfo": extra}}))


class FailureReporter:
    """Reports the failure of one rank.

    Args:
        who: rank and machine.
        listener: launcher that waits for the process; ``None`` to print on standard error.
        hide: source files whose frames are left out at the beginning of tracebacks.

    Attributes:
        exit_code: exit status of this rank's failure, or of the first rank's failure if ``claim`` of :meth:`tell` sets
            it.
    """

    def __init__(self, who: str, listener: Listener | None, hide: Collection[str] = ()) -> None:
        self.who = who
        self.told = False
        self.exit_code = 1
        self._listener = listener
        self._hide = hide
        self._lock = threading.Lock()

    def raised(self, error: BaseException, claim: Callable[[str], str]) -> bool:
        """Report the exception that ends this rank, unless another rank failed first.

        Returns whether this exception was reported as the cause.
        """
        # The rank that failed first may report later than this rank, so this rank must not claim to be the first.
        first = error.who if isinstance(error, OtherRankError) else None
        return self.tell(Failure.of(error, self.who, self._hide), claim if first is None else lambda _who: first)

    def tell(self, failure: Failure, claim: Callable[[str], str]) -> bool:
        """Report a failure, if this rank is the first to fail and this is its first failure.

        Args:
            failure: failure to report.
            claim: takes the name of this rank, and returns the name of the rank that failed first.

        Returns:
            Whether the failure was reported as the cause.
        """
        # The watchdog ends other ranks, after which this rank's main thread fails too.
        with self._lock:
            if self.told:
                return False
            self.told = True
        self.exit_code = failure.exit_code
        # Report before the claim: a rank that was not the first may end at once, which ends all processes.
        if self._listener is not None:
            self._listener.failed(failure)
        try:
            first = claim(self.who)
        except RuntimeError:  # the process that served the store has ended
            first = "another rank" if failure.second_hand else self.who
        if first != self.who:
            if self._listener is not None:
                self._listener.echoes(first)
            return False
        if self._listener is None:
            sys.stderr.write(f"{visible(failure.text)}\n")
            sys.stderr.flush()
        return True
