"""Separate process that renders chat templates, so that their use of memory and time is limited."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

__all__ = ["TemplateError", "TemplateLimits", "TemplateProcess"]

#: Limit of an answer in bytes, enough for the largest rendering that the sandbox allows, in UTF-8 and escaped.
_MAX_ANSWER = 1 << 27
#: Number of consecutive renderings that ended the process by a limit, after which all further ones are refused at once,
#: because each may take the full time.
_MOST_ENDED = 3
_PACKAGES = ("d9d_weights", "jinja2", "markupsafe")
_START = "import sys; sys.path[:0] = sys.argv[1:]; from d9d_weights.templates.worker import main; main()"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering.

    Attributes:
        steps: maximum number of steps: loop iterations, calls and pieces of output.
        seconds: maximum seconds of CPU time.
        memory: maximum bytes of the process's address space; macOS does not enforce this limit.
    """

    steps: int = 1 << 22
    seconds: float = 10.0
    memory: int = 1 << 29


class TemplateError(ValueError):
    """A template is malformed, fails or exceeds its limits.

    Attributes:
        key: name of a malformed template; ``None`` for other errors.
        line: line of the error in a malformed template, if known.
    """

    def __init__(self, message: str, key: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.key, self.line = key, line


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered template.

    Attributes:
        text: rendered text.
        marks: characters ``[begin, end)`` of each generation block.
        misplaced: whether ``marks`` are wrong, because the text of a generation block is not at its recorded position.
    """

    text: str
    marks: tuple[tuple[int, int], ...]
    misplaced: bool


class TemplateProcess:
    """Separate process that renders chat templates, and imports no torch.

    The process serves all renderings, one at a time, and is restarted if a limit ended it. The process ends with this
    object, and with the parent process.

    Args:
        texts: templates by name.
        now: time returned by ``strftime_now``; by default, the time of the rendering.
        limits: limits of one rendering.

    Attributes:
        depends_on_date: whether renderings change from day to day, because a template reads the date.
        marked: whether a template has generation blocks, by the name of the template.

    Raises:
        TemplateError: a template is malformed.
    """

    def __init__(
        self, texts: Mapping[str, str], now: datetime | None = None, limits: TemplateLimits | None = None
    ) -> None:
        self._texts = dict(texts)
        self._now = now
        self._limits = limits or TemplateLimits()
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ended = 0  # consecutive renderings that ended the process
        with self._lock:
            facts = self._start()
        if (malformed := facts["malformed"]) is not None:
            key, line, message = malformed
            raise TemplateError(message, key, line)
        self.depends_on_date: bool = facts["dated"] and now is None
        self.marked: dict[str, bool] = facts["marked"]

    def render(self, key: str, variables: Mapping[str, Any]) -> Rendered:
        """Render a template.

        Args:
            key: name of the template.
            variables: JSON values; other values are converted to text.

        Raises:
            TemplateError: the template raises an error or exceeds its limits, or the variables cannot be sent.
        """
        try:
            request = _line({"key": key, "variables": variables})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the record's values cannot be passed to the template: {error}") from error
        with self._lock:
            if self._ended >= _MOST_ENDED:
                raise TemplateError(f"the template exceeded its limits of time or memory {self._ended} times in a row")
            if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
                self._start()
            self._ended += 1
            answer = self._ask(request)
            self._ended = self._ended if answer.get("ended") else 0
        if "error" in answer:
            raise TemplateError(answer["error"])
        marks = tuple((begin, end) for begin, end in answer["marks"])
        return Rendered(answer["text"], marks, answer["misplaced"])

    def _start(self) -> dict[str, Any]:
        """Start a process, and return facts about the templates."""
        # Not a fork of this process, which has threads and torch. -S: importing site would take most of the time. -P:
        # the working directory may contain malicious modules.
        command = [sys.executable, "-E", "-P", "-S", "-s", "-c", _START, *_paths()]
        child = subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=-1
        )
        self._child, self._owner = child, os.getpid()
        self._end = weakref.finalize(self, _end, child, self._owner)
        limits = self._limits
        now = None if self._now is None else self._now.isoformat()
        return self._ask(_line({"texts": self._texts, "now": now, **vars(limits)}))

    def _ask(self, request: bytes) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        answer = b""
        try:
            self._child.stdin.write(request)
            self._child.stdin.flush()
            answer = self._child.stdout.readline(_MAX_ANSWER)
        except OSError:  # the process has ended
            pass
        finally:
            if not answer.endswith(b"\n"):  # the pipes may hold incomplete data: end the process
                child, self._child = self._child, None
                code = child.poll() if answer else _status(child)
                self._end()
        if not answer.endswith(b"\n"):
            raise TemplateError(self._reason(code, bool(answer)))
        found: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return found

    def _reason(self, code: int | None, answered: bool) -> str:
        """Reason why the process did not answer, for the error message."""
        if answered:
            return f"the template renders more than {_MAX_ANSWER:,} bytes"
        if code == -getattr(signal, "SIGPROF", 0):
            return f"the template takes more than {self._limits.seconds:g} seconds"
        memory = f"{self._limits.memory:,} bytes"
        return f"the template's process ended with status {code}, perhaps for lack of memory ({memory})"


def _status(child: subprocess.Popen[bytes]) -> int | None:
    """Exit status of a process that has closed its output and is about to end; ``None`` if it has not after 1 s."""
    try:
        return child.wait(1)
    except subprocess.TimeoutExpired:
        return None


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


def _paths() -> list[str]:
    """Directories from which the template process may import modules."""
    found = (find_spec(name) for name in _PACKAGES)
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin))


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and wait for it; in a forked copy of the parent, only close the pipes."""
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0  # a forked copy cannot wait for the process: no warning about it
    for pipe in (child.stdin, child.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # data that was not sent cannot be flushed
            continue
