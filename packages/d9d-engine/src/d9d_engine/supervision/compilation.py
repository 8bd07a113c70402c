"""Compilation during a run: how long it takes, and why code that was compiled is compiled again.

Dynamo compiles a function when it is called, and again when a guard of each version that it has fails. Its reasons are
logged, and torch.compile takes no hook for them; where compilation starts and ends, callbacks are told. Both are
private in torch 2.11 to 2.15, so a test fails when they change. A step in which nothing is compiled costs a comparison.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from d9d_core.subscriber import OwnEvent
from torch import nn

__all__ = ["Recompiled"]

#: Steps of a process in which code is compiled: for the first lengths, for others, and for gradients that add up.
FREE_STEPS = 3
#: torch's logger of the reasons, and the name that switches it on.
LOGGER, ARTIFACT = "torch._dynamo.guards.__recompiles", "recompiles"
_REASON = re.compile(r"^\s*- \d+/\d+\S*: (.+)$", re.MULTILINE)
_FUNCTION = re.compile(r"Recompiling function (\S+) in (\S+)")
#: Reason -> what to do about it; the first that matches.
_ADVICE = (
    (
        r"size mismatch|\.size\(\)|\.shape",
        "lengths differ; torch generalises over a dimension at its second size, and 'dynamic: true' of the strategy "
        "compile does at once; batches of one length compile once",
    ),
    (
        r"GLOBAL_STATE|grad_mode|is_grad_enabled|inference_mode|\.training",
        "code without gradients, as evaluations and first passes run it, is compiled for itself once: nothing to do",
    ),
    (r"dtype mismatch", "a tensor came in another number format; give each batch the same formats"),
    (r"stride mismatch", "a tensor lies differently in memory; make it contiguous before it enters the block"),
    (r"requires_grad", "a tensor needs a gradient in some calls only; let it be the same in all"),
    (r"BACKEND_MATCH", "two strategies or libraries compile the same code; keep one of them"),
)
_OTHER = (
    "a value of Python that the block reads has changed; hand it over as a tensor, or keep it the same; "
    "TORCH_LOGS=recompiles prints all reasons"
)


@dataclass(frozen=True, slots=True)
class Recompiled(OwnEvent):
    """Code was compiled again after the first steps; emitted once for each kind of block and cause, on each rank.

    Attributes:
        step: number of steps that are done, with the one that waited for it.
        block: qualified name of the module that was called; empty if it is none of the model.
        function: the block's class, or the function and its file.
        cause: the guard that failed, in torch's words.
        advice: what to do.
        seconds: time for all compilation of the step.
    """

    step: int
    block: str
    function: str
    cause: str
    advice: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Found:
    block: str
    function: str
    reasons: tuple[str, ...]


class CompilationLog:
    """Log of compilation: tells that it takes place, how long it took, and after the first steps why.

    Args:
        model: whose modules are told by name.
        emit: takes :class:`Recompiled`.
        note: prints a line.
        done: steps that were done before.
    """

    def __init__(
        self, model: nn.Module, emit: Callable[[Recompiled], None], note: Callable[[str], None], done: int = 0
    ) -> None:
        self._names = {id(module): (name, module) for name, module in model.named_modules()}
        self._emit = emit
        self._note = note
        self._done = done
        self._told: set[tuple[str, str]] = set()
        self._found: list[_Found] = []
        self._seconds = 0.0
        self._started: float | None = None
        self._announced = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside the block. Where nothing has imported Dynamo, nothing is compiled, and nothing imported."""
        if "torch._dynamo" not in sys.modules:
            yield
            return
        from torch._dynamo.callback import callback_handler as callbacks
        from torch._logging._internal import log_state

        logger = logging.getLogger(LOGGER)
        handler = _Reasons(self._hear)
        others = [other for other in logger.handlers if isinstance(other, _Reasons)]
        # The switch by itself: torch._logging.set_logs, which is public, resets what a user has chosen, and prints.
        now = _Switch(ARTIFACT in log_state.artifact_names, logger.level, logger.propagate)
        handler.before = others[0].before if others else now
        log_state.artifact_names.add(ARTIFACT)
        logger.setLevel(logging.DEBUG)
        logger.propagate = handler.before.on and handler.before.propagate
        logger.addHandler(handler)
        callbacks.register_start_callback(self._start)
        callbacks.register_end_callback(self._end)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            if not any(isinstance(other, _Reasons) for other in logger.handlers):
                if not handler.before.on:
                    log_state.artifact_names.discard(ARTIFACT)
                logger.setLevel(handler.before.level)
                logger.propagate = handler.before.propagate
            with suppress(ValueError):  # torch.compiler.reset() has forgotten them
                callbacks.remove_start_callback(self._start)
            with suppress(ValueError):
                callbacks.remove_end_callback(self._end)

    def after(self, step: int) -> None:
        """Tell what was compiled until now.

        Args:
            step: number of steps that are done.
        """
        if not self._seconds and not self._found:
            return
        found, self._found = self._found, []
        seconds, self._seconds = self._seconds, 0.0
        if step - self._done <= FREE_STEPS:
            self._note(f"compiled for {seconds:.1f} s until the end of step {step}")
            return
        for one in found:
            cause = _telling(one.reasons)
            key = (one.function, re.sub(r"\d+", "#", cause))  # other sizes are the same cause
            if key in self._told:
                continue
            self._told.add(key)
            advice = _advice(cause, one)
            who = f"'{one.block}' ({one.function})" if one.block else one.function
            self._note(f"warning: step {step}: {who} was compiled again ({seconds:.1f} s): {cause}; {advice}")
            self._emit(Recompiled(step, one.block, one.function, cause, advice, seconds))

    def _hear(self, text: str) -> None:
        name = _FUNCTION.search(text)
        function = "code" if name is None else f"{name[1]} of {name[2]}"
        block = ""
        if called := self._called(inspect.currentframe()):
            block, function = called
        reasons = [" ".join(reason.split()) for reason in _REASON.findall(text) or [text]]
        self._found.append(_Found(block, function, tuple(reasons)))

    def _called(self, frame: FrameType | None) -> tuple[str, str] | None:
        """Name and class of the innermost module of the model whose call led here."""
        while frame is not None:
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module) and (known := self._names.get(id(own))) and known[1] is own:
                return known[0], type(own).__name__
            frame = frame.f_back
        return None

    def _start(self, _: Any) -> None:
        self._started = time.perf_counter()
        if not self._announced:
            self._announced = True
            self._note("compiling ...: the first steps take longer; the next start finds most of it in torch's cache")

    def _end(self, _: Any) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None


@dataclass(frozen=True, slots=True)
class _Switch:
    """Switch of torch's lines: whether they are on, from which level, and whether they are printed."""

    on: bool = False
    level: int = logging.NOTSET
    propagate: bool = True


class _Reasons(logging.Handler):
    """Handler of torch's lines about recompilation, which are printed nowhere.

    Args:
        hear: takes a line.

    Attributes:
        before: what to return to when the last of them leaves.
    """

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._hear = hear
        self.before = _Switch()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line, in the thread that compiles."""
        self._hear(record.getMessage())


def _telling(reasons: tuple[str, ...]) -> str:
    """Most telling reason: each version in the cache has one, and that of another mode says nothing."""
    return next((reason for reason in reasons if "GLOBAL_STATE" not in reason), reasons[0])


def _advice(cause: str, found: _Found) -> str:
    text = next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), _OTHER)
    from torch._dynamo import config  # documented, and imported by now

    if len(found.reasons) >= config.recompile_limit:
        return f"that was the last time: from {len(found.reasons) + 1} versions on it runs uncompiled; {text}"
    return text
