"""Records which lines of d9d each test runs, in all of its processes; goes by the name ``sitecustomize``.

Every process that inherits the environment imports it at its start, forked ones keep what it set up. A line is written
down at once, so that a process that is killed loses nothing.
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

#: Directory of the records and of the number of the test that runs now.
RECORDS = "D9D_MUTATION_RECORDS"
#: Directory of the sources that are recorded.
SOURCES = "D9D_MUTATION_SOURCES"


class Recorder:
    """Writer of the lines that run.

    Args:
        records: directory with the file ``current``, which holds the number of the test that runs.
        sources: path before the sources that count.
    """

    def __init__(self, records: Path, sources: str) -> None:
        self._sources = sources
        self._current = os.open(records / "current", os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(records / "lines", flags, 0o644)
        self._again: object = None
        self._seen: set[tuple[bytes, str, int]] = set()

    def begin(self) -> None:
        """Watch all threads of this process."""
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
        # Not again before the next test, which restarts the events.
        return self._again

    def _call(self, frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        return self._trace if frame.f_code.co_filename.startswith(self._sources) else None

    def _trace(self, frame: FrameType, event: str, _argument: object) -> TraceFunction:
        if event == "line":
            self._write(frame.f_code.co_filename, frame.f_lineno)
        return self._trace

    def _write(self, file: str, line: int) -> None:
        # Who closes all files of the process, as a daemon does, ends the record and not the program.
        with contextlib.suppress(OSError):
            key = os.pread(self._current, 16, 0), file, line
            if key not in self._seen:
                self._seen.add(key)
                os.write(self._lines, b"%s\t%s\t%d\n" % (key[0].strip(), file[len(self._sources) :].encode(), line))


if __name__ == "sitecustomize" and RECORDS in os.environ:
    Recorder(Path(os.environ[RECORDS]), os.environ[SOURCES]).begin()
