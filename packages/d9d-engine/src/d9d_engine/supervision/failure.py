"""Failure reports of ranks, so that the user reads the cause, once. Imports no torch.

Where somebody waits for the process, the text goes there, and is printed when everything has ended: to ``d9d train
--nproc`` over its link, to torchrun's elastic agent in the file and the format that it asks for. Elsewhere the rank
prints it. Ranks that fail because another one did stay silent.
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

from d9d_core.errors import D9dError
from d9d_core.failures import describe
from d9d_core.untrusted import visible
from d9d_weights.files.atomic import write_text

#: What a broken connection to another rank looks like; its cause may lie there.
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo/|nccl|timed out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a rank, as it is reported.

    Attributes:
        text: what the user reads.
        exit_code: of the process.
        second_hand: it looks like the consequence of what happened to another rank.
    """

    text: str
    exit_code: int = 1
    second_hand: bool = False

    @classmethod
    def of(cls, error: BaseException, who: str | None = None, hide: Collection[str] = ()) -> Failure:
        """Make the failure of an exception: the message of one raised on purpose, the traceback of any other.

        Args:
            error: what was raised.
            who: rank and node, for the headline above a traceback; without it, none is made.
            hide: source files whose frames are left out where the traceback begins.
        """
        if isinstance(error, D9dError):
            return cls(describe(error), error.exit_code)
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in hide:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        if who is not None:
            text = f"{who} failed:\n{text}"
        return cls(text, 1, isinstance(error, RuntimeError | OSError) and bool(_BROKEN.search(str(error))))


class Listener(Protocol):
    """Protocol of who waits for a process and wants to know why it failed."""

    def failed(self, failure: Failure) -> None:
        """Tell why this process fails; the last one counts."""
        ...

    def echoes(self, first: str) -> None:
        """Tell that this process fails because the one named ``first`` did."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """File for a rank's failure that an elastic agent asked for with ``TORCHELASTIC_ERROR_FILE``.

    Attributes:
        path: of the file.
    """

    path: Path

    def failed(self, failure: Failure) -> None:
        """Write the failure."""
        self._replace(failure.text, time.time())

    def echoes(self, first: str) -> None:
        """Write whose failure led to this one, with a later time: an agent takes the earliest for the cause."""
        self._replace(f"stopped because {first} failed", time.time() + 1)

    def _replace(self, text: str, when: float) -> None:
        headline = text.strip().rpartition("\n")[2]
        extra = {"py_callstack": text, "timestamp": str(int(when))}
        # In one step: the process may be ended while it writes, and half a file would hide the cause.
        write_text(self.path, json.dumps({"message": {"message": headline, "extraInfo": extra}}))


class FailureReporter:
    """Reporter of the failure of one rank.

    Args:
        who: rank and node.
        listener: who started the process and waits for it; without one, standard error is used.
        hide: source files whose frames are left out where tracebacks begin.
    """

    def __init__(self, who: str, listener: Listener | None, hide: Collection[str] = ()) -> None:
        self.who = who
        self.told = False
        self._listener = listener
        self._hide = hide
        self._lock = threading.Lock()

    def raised(self, error: BaseException, claim: Callable[[str], str]) -> None:
        """Report an exception that ends this rank, unless its cause lies in another one."""
        self.tell(Failure.of(error, self.who, self._hide), claim)

    def tell(self, failure: Failure, claim: Callable[[str], str]) -> bool:
        """Report a failure, if this rank is the first to fail and this is its first failure.

        Args:
            failure: what to tell.
            claim: takes the name of this rank and returns that of the rank which failed first.

        Returns:
            Whether it was told as the cause.
        """
        # The watchdog ends other ranks, upon which the main thread of this one fails as well.
        with self._lock:
            if self.told:
                return False
            self.told = True
        # Before the claim: a rank that learns that it is not the first may end, which ends all.
        if self._listener is not None:
            self._listener.failed(failure)
        try:
            first = claim(self.who)
        except RuntimeError:  # the store is gone, with the process that held it
            first = "another rank" if failure.second_hand else self.who
        if first != self.who:
            if self._listener is not None:
                self._listener.echoes(first)
            return False
        if self._listener is None:
            sys.stderr.write(f"{visible(failure.text)}\n")
            sys.stderr.flush()
        return True
