"""Log of compilation during a run: its duration, and the reasons for recompilation.

Dynamo compiles a function at its first call, and again when a guard of every cached version fails. Dynamo logs the
reasons, for which torch.compile has no hook, and callbacks report the start and end of compilation. The logger and the
callbacks are private in torch 2.11 to 2.15, so a test detects changes. A step without compilation costs one comparison.
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

#: Number of first steps in which compilation is expected: Dynamo compiles for the first input length, again for other
#: lengths, and again for accumulated gradients.
FREE_STEPS = 3
#: torch's logger of recompilation reasons, and the name of the artifact that enables it.
LOGGER, ARTIFACT = "torch._dynamo.guards.__recompiles", "recompiles"
_REASON = re.compile(r"^\s*- \d+/\d+\S*: (.+)$", re.MULTILINE)
_FUNCTION = re.compile(r"Recompiling function (\S+) in (\S+)")
#: (Pattern of a reason, advice); the first match is used.
_ADVICE = (
    (
        r"size mismatch|\.size\(\)|\.shape",
        "sequence lengths differ; torch generalises over a dimension at its second size, and 'dynamic: true' of the "
        "strategy compile does so at once; batches of one length compile once",
    ),
    (
        r"GLOBAL_STATE|grad_mode|is_grad_enabled|inference_mode|\.training",
        "code without gradients (evaluations and first passes) is compiled separately once: nothing to do",
    ),
    (r"dtype mismatch", "a tensor has another dtype; give each batch the same dtypes"),
    (r"stride mismatch", "a tensor has another memory layout; make it contiguous before the block"),
    (r"requires_grad", "a tensor requires a gradient in some calls only; make all calls alike"),
    (r"BACKEND_MATCH", "two strategies or libraries compile the same code; keep one of them"),
)
_OTHER = (
    "a Python value that the block reads has changed; pass it as a tensor, or keep it constant; "
    "TORCH_LOGS=recompiles prints all reasons"
)


@dataclass(frozen=True, slots=True)
class Recompiled(OwnEvent):
    """Event of a recompilation after the first steps; emitted once per kind of block and cause, on each rank.

    Attributes:
        step: number of steps done, including the step with the recompilation.
        block: qualified name of the recompiled module; empty for code outside of the model.
        function: class of the module, or function and file.
        cause: failed guard, in torch's words.
        advice: suggested change.
        seconds: time of all compilations in the step.
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
    """Prints when torch.compile starts, how many seconds it took, and, after the first steps, why it compiled again.

    Args:
        model: model whose modules are named.
        emit: called with :class:`Recompiled`.
        note: prints a line.
        done: number of steps done before this start.
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
        """Listen for compilations inside the block; no effect without Dynamo imported, as nothing is compiled then."""
        if "torch._dynamo" not in sys.modules:
            yield
            return
        from torch._dynamo.callback import callback_handler as callbacks
        from torch._logging._internal import log_state

        logger = logging.getLogger(LOGGER)
        handler = _Reasons(self._record_reason)
        others = [other for other in logger.handlers if isinstance(other, _Reasons)]
        # Set this artifact only: the public torch._logging.set_logs would reset the user's settings and print.
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
            with suppress(ValueError):  # torch.compiler.reset() removes callbacks
                callbacks.remove_start_callback(self._start)
            with suppress(ValueError):
                callbacks.remove_end_callback(self._end)

    def after(self, step: int) -> None:
        """Report the compilations since the last call: in the first steps their seconds, later each new cause.

        Args:
            step: number of steps done.
        """
        if not self._seconds and not self._found:
            return
        found, self._found = self._found, []
        seconds, self._seconds = self._seconds, 0.0
        if step - self._done <= FREE_STEPS:
            self._note(f"step {step}: torch.compile took {seconds:.1f} s since the last report")
            return
        for one in found:
            cause = _most_informative(one.reasons)
            key = (one.function, re.sub(r"\d+", "#", cause))  # causes that differ only in sizes count as one
            if key in self._told:
                continue
            self._told.add(key)
            advice = _advice(cause, one)
            who = f"'{one.block}' ({one.function})" if one.block else one.function
            self._note(f"warning: step {step}: {who} was compiled again ({seconds:.1f} s): {cause}; {advice}")
            self._emit(Recompiled(step, one.block, one.function, cause, advice, seconds))

    def _record_reason(self, text: str) -> None:
        name = _FUNCTION.search(text)
        function = "code" if name is None else f"{name[1]} of {name[2]}"
        block = ""
        if called := self._called(inspect.currentframe()):
            block, function = called
        reasons = [" ".join(reason.split()) for reason in _REASON.findall(text) or [text]]
        self._found.append(_Found(block, function, tuple(reasons)))

    def _called(self, frame: FrameType | None) -> tuple[str, str] | None:
        """Name and class of the innermost module of the model among the calling frames."""
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
            self._note("compiling ...: the first steps take longer; the next start reuses torch's cache")

    def _end(self, _: Any) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None


@dataclass(frozen=True, slots=True)
class _Switch:
    """Settings of torch's logger of recompilations: whether it is enabled, its level, and whether it propagates."""

    on: bool = False
    level: int = logging.NOTSET
    propagate: bool = True


class _Reasons(logging.Handler):
    """Log handler that receives torch's lines about recompilation without printing them.

    Args:
        hear: called with each line.

    Attributes:
        before: logger settings to restore when the last such handler is removed.
    """

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._record_reason = hear
        self.before = _Switch()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a line of torch's log to ``hear``, in the thread that compiles."""
        self._record_reason(record.getMessage())


def _most_informative(reasons: tuple[str, ...]) -> str:
    """Choose the most informative reason; there is one per cached version, and a changed grad mode tells least."""
    return next((reason for reason in reasons if "GLOBAL_STATE" not in reason), reasons[0])


def _advice(cause: str, found: _Found) -> str:
    text = next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), _OTHER)
    from torch._dynamo import config  # documented, and already imported

    if len(found.reasons) >= config.recompile_limit:
        return f"last recompilation: from {len(found.reasons) + 1} versions on this code runs uncompiled; {text}"
    return text
