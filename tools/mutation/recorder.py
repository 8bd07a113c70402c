"""Records which lines of d9d each test runs, in all its processes; installed under the name ``sitecustomize``.

Every process that inherits the environment imports this module at start; forked processes inherit its hooks. Each line
is written immediately, so that a killed process loses no record.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction

#: Environment variable with the directory of the records and of the current test's number.
RECORDS = "D9D_MUTATION_RECORDS"
#: Environment variable with the directory of the recorded sources.
SOURCES = "D9D_MUTATION_SOURCES"


class Recorder:
    """Recorder of executed lines.

    Args:
        records: directory with the file ``current``, which contains the number of the running test.
        sources: path prefix of the recorded sources.
    """

    def __init__(self, records: Path, sources: str) -> None:
        self._sources = sources
        self._current = os.open(records / "current", os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(records / "lines", flags, 0o644)
        self._again: object = None
        self._seen: set[tuple[bytes, str, int]] = set()

    def begin(self) -> None:
        """Start to record all threads of this process."""
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            self._again = monitoring.DISABLE
            monitoring.use_tool_id(monitoring.COVERAGE_ID, "d9d-mutation")
            monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
            monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
        else:
            threading.settrace(self._call)
            sys.settrace(self._call)

    def _line(self, code: CodeType, line: int) -> object:
        if code.co_filename.startswith(self._sources):
            self._write(code.co_filename, line)
        # No further events for this line before the next test, which re-enables them.
        return self._again

    def _call(self, frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        return self._trace if frame.f_code.co_filename.startswith(self._sources) else None

    def _trace(self, frame: FrameType, event: str, _argument: object) -> TraceFunction:
        if event == "line":
            self._write(frame.f_code.co_filename, frame.f_lineno)
        return self._trace

    def _write(self, file: str, line: int) -> None:
        # If the process has closed all its files, as a daemon does, only the recording ends.
        with contextlib.suppress(OSError):
            key = os.pread(self._current, 16, 0), file, line
            if key not in self._seen:
                self._seen.add(key)
                os.write(self._lines, b"%s\t%s\t%d\n" % (key[0].strip(), file[len(self._sources) :].encode(), line))


if __name__ == "sitecustomize" and RECORDS in os.environ:
    Recorder(Path(os.environ[RECORDS]), os.environ[SOURCES]).begin()
