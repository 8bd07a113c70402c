"""Logging of device tensors some steps later, without waiting for the GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from d9d_core.errors import NonFiniteError
from d9d_core.events import StepResult
from d9d_core.metric import Table
from d9d_core.tensors import wide_dtype
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Skips:
    """Skipped steps of a run, as far as their flags have been read. Steps are 1-based.

    Attributes:
        total: number of skipped steps.
        in_a_row: number of consecutive skipped steps up to the newest step.
        first: first skipped step; 0 if there is none.
        began: first of the consecutive skipped steps; 0 if the newest step was finite.
    """

    total: int = 0
    in_a_row: int = 0
    first: int = 0
    began: int = 0

    def after(self, step: int, finite: bool) -> Skips:
        """Return the counts after one more step, which was skipped or not."""
        if finite:
            return replace(self, in_a_row=0, began=0)
        return Skips(self.total + 1, self.in_a_row + 1, self.first or step, self.began or step)

    @property
    def kept_before(self) -> tuple[int, ...]:
        """Steps before which the last checkpoint is kept, because the weights of later checkpoints may be useless."""
        return tuple(sorted({self.first, self.began} - {0}))

    def state(self) -> dict[str, int]:
        """Counts as JSON values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Skips:
        """Make the counts from values of a checkpoint that passed :func:`is_state`."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})


def is_state(values: object) -> bool:
    """Whether a checkpoint's values have the form of :meth:`Skips.state`."""
    names = {field.name for field in fields(Skips)}
    if not isinstance(values, dict) or values.keys() != names:
        return False
    return all(type(value) is int and value >= 0 for value in values.values())


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    names: tuple[str, ...]
    tables: Mapping[str, Table]  # their values are on the device
    values: Tensor  # values of `names`, then the cells of each table; on the host once `copied` has passed
    copied: torch.Event | None
    host: Mapping[str, float] | None  # None if the step is checked but not logged
    seconds: float


class Logbook:
    """Reads the values of every step, and logs some steps.

    All ranks read a step's values after the same later step, so that consequences (an error, a stop) take effect on all
    ranks at once.

    Args:
        write: called with the step (1-based) and the values of a logged step.
        watch: called with the step (1-based) and the loss of every step.
        nonfinite: whether a step with a non-finite loss or gradient is an error or is skipped.
        skips: steps skipped so far.
        max_skipped: number of consecutive skipped steps at which the run ends with an error.
        tokens: number of tokens consumed before this start.
        write_tables: called with the step and the tables of a logged step; ``None`` without receivers of tables.
        utilisation: tokens per second -> further values of a logged step.
        max_pending: number of steps that the host may be ahead of the values it has read from a device.
    """

    def __init__(
        self,
        write: Callable[[int, Mapping[str, float]], None],
        watch: Callable[[int, float], None],
        nonfinite: Literal["error", "skip"],
        skips: Skips | None = None,
        max_skipped: int = 10,
        tokens: int = 0,
        write_tables: Callable[[int, Mapping[str, Table]], None] | None = None,
        utilisation: Callable[[float], Mapping[str, float]] | None = None,
        max_pending: int = 2,
    ) -> None:
        self._max_pending = max_pending
        self._utilisation = utilisation or (lambda _rate: {})
        self._write = write
        self._write_tables = write_tables
        self._watch = watch
        self._nonfinite = nonfinite
        self._pending: deque[_Entry] = deque()
        self.skips = skips or Skips()
        self._max_skipped = max_skipped
        self.tokens = tokens
        self._tokens_logged = tokens
        self.stop = False

    def record(
        self,
        step: int,
        result: StepResult,
        logged: Mapping[str, float] | None,
        measured: Mapping[str, Tensor | Table] | None = None,
        seconds: float = 0.0,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Record a step, and log older steps whose values have arrived.

        Args:
            step: number of the step, 1-based.
            result: device tensors of the step.
            logged: host values to log with the step; ``None`` if the step is not logged.
            measured: further 0-d device tensors to log, and tables.
            seconds: time since the last logged step, for the series ``tokens_per_second``.
            beside: returns a context manager that makes the stream of ``measured`` current; values are copied in that
                stream, so that the step's stream does not wait for ``measured``.

        Raises:
            NonFiniteError: this or an earlier step was not finite and the policy is ``error``, or too many consecutive
                steps were not finite.
        """
        tensors = {name: getattr(result, name) for name in ("finite", "stop", "tokens", "loss", "grad_norm")}
        tables: dict[str, Table] = {}
        if logged is not None:
            several = len(result.terms) > 1
            tensors |= {f"loss/{term}": mean for term, mean in result.terms.items()} if several else {}
            for name, value in (measured or {}).items():
                if not isinstance(value, Table):
                    tensors[name] = value
                elif self._write_tables is not None:
                    tables[name] = value
        cells = [*tensors.values(), *(table.values for table in tables.values())]
        with nullcontext() if measured is None else beside():
            values, copied = _copied(cells)
        self._pending.append(_Entry(step, tuple(tensors), tables, values, copied, logged, seconds))
        limit = self._max_pending if copied is not None else 0
        while len(self._pending) > limit:  # do not test `copied`, which differs between ranks
            self._take(self._pending.popleft())

    def drain(self) -> None:
        """Wait for the values of all steps so far; afterwards, each of them is known to be finite or skipped.

        Raises:
            NonFiniteError: a step was not finite and the policy is ``error``, or too many consecutive steps were not
                finite.
        """
        while self._pending:
            self._take(self._pending.popleft())

    def _take(self, entry: _Entry) -> None:
        if entry.copied is not None:
            entry.copied.synchronize()
        count = len(entry.names)
        values = dict(zip(entry.names, entry.values[:count].tolist(), strict=True))
        finite = bool(values.pop("finite"))
        self.skips = self.skips.after(entry.step, finite)
        if not finite:
            self._handle_nonfinite(entry.step, values)
        self.stop = self.stop or bool(values.pop("stop"))
        self.tokens += round(values.pop("tokens"))
        loss = values["loss"]
        if entry.host is not None:
            values |= {"tokens": float(self.tokens), **entry.host}
            rate = (self.tokens - self._tokens_logged) / max(entry.seconds, 1e-9)
            values |= {"tokens_per_second": rate, **self._utilisation(rate)}
            self._tokens_logged = self.tokens
            extra = {"skipped_steps": float(self.skips.total)} if self.skips.total else {}
            self._write(entry.step, {**values, **extra})
        self._watch(entry.step, loss)
        if entry.tables and self._write_tables is not None:
            self._write_tables(entry.step, _filled(entry.tables, entry.values[count:]))

    def _handle_nonfinite(self, step: int, values: Mapping[str, float]) -> None:
        names = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        what = " and ".join(f"{name} is {values[name]}" for name in names)
        if self._nonfinite == "error":
            raise NonFiniteError(
                f"step {step}: {what}; this step changed nothing. Look at its data, lower the learning rate, "
                "or set 'nonfinite: skip' to skip such steps"
            )
        if self.skips.in_a_row >= self._max_skipped:
            began = self.skips.began
            raise NonFiniteError(
                f"step {step}: {what}; {self.skips.in_a_row} steps in a row since step {began}; weights "
                f"are probably useless. The last checkpoint before step {began} was kept: remove newer ones, "
                "lower the learning rate or inspect the data there, and start again; or raise max_skipped"
            )


def _copied(cells: Sequence[Tensor]) -> tuple[Tensor, torch.Event | None]:
    """Copy all cells to the host as one 1-D tensor, in the current stream; the event completes after the copy."""
    device = cells[0].device
    values = torch.cat([tensor.flatten().to(wide_dtype(tensor.device)) for tensor in cells])
    if device.type == "cpu":
        return values, None
    current = torch.accelerator.current_stream(device)
    if device.type != "mps":  # MPS has a single stream
        for cell in cells:
            # A cell may come from another stream; the allocator must not reuse its memory while this stream reads it.
            cell.record_stream(current)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.Event(device)
    copied.record(current)
    return host, copied


def _filled(tables: Mapping[str, Table], cells: Tensor) -> dict[str, Table]:
    """Fill tables with values in host memory; ``cells`` holds the cells of all tables, one after the other."""
    parts = torch.split(cells, [table.values.numel() for table in tables.values()])
    pairs = zip(tables.items(), parts, strict=True)
    return {name: replace(table, values=part.view(table.values.shape)) for (name, table), part in pairs}
