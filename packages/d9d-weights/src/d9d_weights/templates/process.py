"""Templates in a process of their own: what one does to memory and time stays there."""

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

#: Bytes of the largest answer: a rendering of as many characters as the sandbox allows, in UTF-8 and escaped.
_MAX_ANSWER = 1 << 27
#: Renderings that end the process, after which a template renders nothing more: each may take all of its seconds.
_MOST_ENDED = 3
_PACKAGES = ("d9d_weights", "jinja2", "markupsafe")
_START = "import sys; sys.path[:0] = sys.argv[1:]; from d9d_weights.templates.worker import main; main()"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering.

    Attributes:
        steps: iterations of loops, and calls.
        seconds: of a processor.
        memory: bytes of the address space of the process; macOS does not keep this limit.
    """

    steps: int = 1 << 22
    seconds: float = 10.0
    memory: int = 1 << 29


class TemplateError(ValueError):
    """Template that is malformed, fails or exceeds its limits.

    Attributes:
        key: name of the template, if it is malformed.
        line: of the template, if it is malformed there.
    """

    def __init__(self, message: str, key: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.key, self.line = key, line


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered template.

    Attributes:
        text: the rendering.
        marks: characters ``[begin, end)`` of each generation block.
        misplaced: whether a block was rendered into something else than the text, so that its place is unknown.
    """

    text: str
    marks: tuple[tuple[int, int], ...]
    misplaced: bool


class TemplateProcess:
    """Process of its own that renders chat templates, and imports no torch.

    The process serves all renderings, one at a time, and is started anew after it has ended. It ends with this object,
    and with the process that made it.

    Args:
        texts: templates by name.
        now: time that ``strftime_now`` tells; if absent, the time of the rendering.
        limits: of one rendering.

    Attributes:
        depends_on_date: whether renderings differ from day to day, because a template asks for the date.
        marked: name of a template -> whether it has generation blocks.

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
        self._ended = 0  # renderings in a row that the process did not live through
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
            key: its name.
            variables: as JSON has them; what JSON has not is sent as its text.

        Raises:
            TemplateError: the template refuses the variables, fails, or exceeds its limits.
        """
        try:
            request = _line({"key": key, "variables": variables})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the values cannot be sent to it: {error}") from error
        with self._lock:
            if self._ended >= _MOST_ENDED:
                raise TemplateError(f"it exceeded its limits {self._ended} times in a row")
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
        """Start a process, and return the facts of the templates."""
        # Not as a copy of this process, which has threads and torch; without site, which would cost most of the time,
        # and with -P, because the working directory may be the one of the template.
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
        except OSError:  # it has ended
            pass
        finally:
            if not answer.endswith(b"\n"):  # half a request or an answer is in the pipes
                child, self._child = self._child, None
                code = child.poll() if answer else _status(child)
                self._end()
        if not answer.endswith(b"\n"):
            raise TemplateError(self._reason(code, bool(answer)))
        found: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return found

    def _reason(self, code: int | None, answered: bool) -> str:
        """Why there is no answer."""
        if answered:
            return f"it renders more than {_MAX_ANSWER:,} bytes"
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {self._limits.seconds:g} seconds"
        return f"its process ended with status {code}, perhaps for want of memory ({self._limits.memory:,} bytes)"


def _status(child: subprocess.Popen[bytes]) -> int | None:
    """Status of a process that closed its output, which is the last that it does."""
    try:
        return child.wait(1)
    except subprocess.TimeoutExpired:
        return None


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


def _paths() -> list[str]:
    """Directories that the process imports from."""
    found = (find_spec(name) for name in _PACKAGES)
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin))


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and wait for it; a copy of the process that started it closes its own ends alone."""
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0  # which is not known here, and not asked for
    for pipe in (child.stdin, child.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was not sent
            continue
