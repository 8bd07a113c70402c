"""Failures of ranks, which each rank writes into the folder of the submission. Needs neither Ray nor torch."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

from d9d_core.launcher import EXIT_FAILED
from d9d_core.untrusted import visible
from d9d_engine.supervision.failure import Failure

from d9d_ray.order import write_values

_NAME = "ray-cause-{}.json"


class Causes:
    """Writes this rank's failure to a file that all ranks read. A :class:`~d9d_engine.supervision.failure.Listener`.

    A rank writes the file before it closes its connections, so other ranks, which fail when a connection closes, find
    the file.

    Args:
        folder: folder of the submission.
        rank: number of this rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = folder / _NAME.format(rank)
        self._failure: Failure | None = None

    def clear(self) -> None:
        """Remove the file of this rank from an earlier start."""
        self._file.unlink(missing_ok=True)

    def failed(self, failure: Failure) -> None:
        """Write the failure of this rank."""
        self._failure = failure
        with suppress(OSError):  # a full disk must not hide the failure
            write_values(self._file, {"text": failure.text, "status": failure.exit_code, "echo": failure.second_hand})

    def echoes(self, first: str) -> None:  # noqa: ARG002 - Listener
        """Withdraw the failure: another rank failed first."""
        self._failure = None
        self._file.unlink(missing_ok=True)

    def ends_for_good(self, error: Exception) -> bool:
        """Print the failure of this rank; return whether a restart would repeat the failure of any rank."""
        # If no rank has written a failure, the ranks failed before they had connected. Then this rank writes its own.
        if not self._file.exists() and not all_causes(self._folder):
            self.failed(Failure.of(error))
        if self._failure is not None:
            sys.stderr.write(f"{visible(self._failure.text)}\n")
            sys.stderr.flush()
        return fails_for_good(self._folder)


def all_causes(folder: Path) -> list[tuple[str, int]]:
    """Texts and exit statuses of the failures of the newest start.

    Failures that a restart would repeat come first, consequences of other ranks' failures last.
    """
    found = []
    for file in sorted(folder.glob(_NAME.format("*"))):
        with suppress(OSError, ValueError, KeyError, TypeError):  # another rank withdraws its file meanwhile
            values = json.loads(file.read_text("utf-8"))
            found.append((bool(values["echo"]), str(values["text"]), int(values["status"])))
    return [(text, status) for _, text, status in sorted(found, key=lambda cause: (cause[2] != EXIT_FAILED, cause[0]))]


def fails_for_good(folder: Path) -> bool:
    """Whether a restart would repeat a failure of the newest start."""
    return any(status == EXIT_FAILED for _, status in all_causes(folder))


def clear_causes(folder: Path) -> None:
    """Remove the failures of an earlier submission."""
    for file in folder.glob(_NAME.format("*")):
        file.unlink(missing_ok=True)
