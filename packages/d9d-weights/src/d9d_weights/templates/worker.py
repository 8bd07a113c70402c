"""Worker process that renders templates: reads requests from standard input, and writes answers to standard output.

A request and an answer are one line of JSON each. The first request contains the templates; each later request asks
for one rendering.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from d9d_weights.templates.sandbox import Sandbox


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = _read(requests)
    if first is None:
        return
    _limit_memory(first["memory"])
    with _Bounded(first["seconds"]):
        templates = _Templates(first)
    _write(answers, {"malformed": templates.malformed, "dated": templates.dated, "marked": templates.marked})
    while (request := _read(requests)) is not None:
        with _Bounded(first["seconds"]):
            try:
                answer = templates.render(request["key"], request["variables"])
            except MemoryError:
                answer = {"error": "it exceeds the memory limit of templates", "ended": True}
            _write(answers, answer)
        if answer.get("ended"):
            return  # the remaining memory may be too small for the next request


class _Templates:
    """Compiled templates of the first request."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        now = None if first["now"] is None else datetime.fromisoformat(first["now"])
        self._sandbox = Sandbox(first["steps"], now)
        self._compiled: dict[str, jinja2.Template] = {}
        #: Key, line and cause of the first malformed template.
        self.malformed: tuple[str, int | None, str] | None = None
        self.dated = False
        self.marked: dict[str, bool] = {}
        for key, text in first["texts"].items():
            try:
                self._add(key, text)
            except TemplateSyntaxError as error:
                self.malformed = key, error.lineno, error.message or ""
            except (TemplateError, SyntaxError) as error:
                self.malformed = key, getattr(error, "lineno", None), str(error)
            except (RecursionError, MemoryError, ValueError) as error:
                self.malformed = key, None, f"it is nested too deeply or has an invalid literal ({error})"
            if self.malformed is not None:
                return

    def _add(self, key: str, text: str) -> None:
        tree = self._sandbox.parse(text, key, key)
        names = tree.find_all(nodes.Name)
        self.dated |= any(node.name == "strftime_now" and node.ctx == "load" for node in names)
        self.marked[key] = any(_is_generation_block(call) for call in tree.find_all(nodes.CallBlock))
        self._compiled[key] = self._sandbox.compile_bounded(tree, key)

    def render(self, key: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Render a template. Returns ``text``, ``marks`` and ``misplaced`` of a rendering, or the ``error``."""
        try:
            text = self._sandbox.run(self._compiled[key], variables)
        except TemplateError as error:
            return {"error": error.message or type(error).__name__}
        except RecursionError:
            return {"error": "it recurses without end"}
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any exception
            return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        found = self._sandbox.marks
        misplaced = any(text[begin : begin + len(body)] != body for begin, body in found)
        marks = [(begin, begin + len(body)) for begin, body in found if body]
        return {"text": text, "marks": marks, "misplaced": misplaced}


class _Bounded:
    """Context manager that ends this process if the block takes too much CPU time. Without effect on Windows."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._set(self._seconds)

    def __exit__(self, *_: object) -> None:
        self._set(0)

    @staticmethod
    def _set(seconds: float) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal SIGPROF ends the process


def _limit_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    # macOS accepts the limit but does not enforce it.
    for kind, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):  # a lower limit is already in force
            continue


def _is_generation_block(call: nodes.CallBlock) -> bool:
    return isinstance(call.call.node, nodes.ExtensionAttribute) and call.call.node.name == "record"


def _read(requests: BinaryIO) -> Any:
    line = requests.readline()
    return json.loads(line.decode("utf-8", "surrogatepass")) if line else None


def _write(answers: BinaryIO, answer: Any) -> None:
    answers.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    answers.flush()
