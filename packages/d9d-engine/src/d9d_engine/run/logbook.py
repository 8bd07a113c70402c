"""Logging of device tensors a few steps later, without waiting for the GPU."""

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
    """Skipped steps of a run, as far as the logbook has read their flags. Steps are 1-based.

    Attributes:
        total: all of them.
        in_a_row: up to the newest step that was read.
        first: the first one; 0 if there is none.
        began: the first one of those in a row; 0 if the newest step was finite.
    """

    total: int = 0
    in_a_row: int = 0
    first: int = 0
    began: int = 0

    def after(self, step: int, finite: bool) -> Skips:
        """Skips after one more step."""
        if finite:
            return replace(self, in_a_row=0, began=0)
        return Skips(self.total + 1, self.in_a_row + 1, self.first or step, self.began or step)

    @property
    def kept_before(self) -> tuple[int, ...]:
        """Steps before each of which the last checkpoint is kept: what follows may be beyond repair."""
        return tuple(sorted({self.first, self.began} - {0}))

    def state(self) -> dict[str, int]:
        """Values for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Skips:
        """Skips of a checkpoint's values; see :func:`is_state`."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})


def is_state(values: object) -> bool:
    """Whether a checkpoint's values are those of :meth:`Skips.state`."""
    names = {field.name for field in fields(Skips)}
    if not isinstance(values, dict) or values.keys() != names:
        return False
    return all(type(value) is int and value >= 0 for value in values.values())


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    names: tuple[str, ...]
    tables: Mapping[str, Table]  # with the device's values
    values: Tensor  # [names, then the cells of each table], on the host once `copied` has passed
    copied: torch.Event | None
    host: Mapping[str, float] | None  # None: this step is watched, not logged
    seconds: float


class Logbook:
    """Logbook of steps: watches every one, and writes some.

    All ranks read the values of a step after the same later step, so that what follows from them (an error, a stop)
    happens everywhere at once.

    Args:
        write: gets the step (1-based) and the values of a step to be logged.
        watch: gets the step (1-based) and the loss of every step.
        nonfinite: what follows a step whose loss or gradient was not finite.
        skips: such steps so far.
        max_skipped: how many in a row are skipped before it is an error.
        tokens: how many tokens were consumed before.
        write_tables: gets the tables of a step to be logged, if there are any; ``None`` if nobody takes tables.
        utilisation: tokens per second -> further values of a step to be logged.
        max_pending: steps that the host may be ahead of the values it has seen, if they are copied from a device.
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
        """Take in a step; older steps whose values have arrived are written.

        Args:
            step: 1-based.
            result: device tensors.
            logged: host values to log with it; ``None`` if the step is not logged.
            measured: further 0-d device tensors to log, and tables.
            seconds: time since the last step that was logged, for the series ``tokens_per_second``.
            beside: makes the stream that ``measured`` may be read in the current one; then the copy is made there, and
                the stream of the step does not wait for what was measured.

        Raises:
            NonFiniteError: an earlier step was not finite and the policy is ``error``, or too many in a row were not.
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
        while len(self._pending) > limit:  # not: as far as copied, which differs between ranks
            self._take(self._pending.popleft())

    def drain(self) -> None:
        """Wait for all values; afterwards every step so far is known to be finite (or skipped).

        Raises:
            NonFiniteError: one was not and the policy is ``error``, or too many in a row were not.
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
            self._meet_nonfinite(entry.step, values)
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

    def _meet_nonfinite(self, step: int, values: Mapping[str, float]) -> None:
        names = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        what = " and ".join(f"{name} is {values[name]}" for name in names)
        if self._nonfinite == "error":
            raise NonFiniteError(
                f"step {step}: {what}; this step changed nothing. Look at its data, lower the learning rate, "
                "or set 'nonfinite: skip' to go on without such steps"
            )
        if self.skips.in_a_row >= self._max_skipped:
            began = self.skips.began
            raise NonFiniteError(
                f"step {step}: {what}, and so on for {self.skips.in_a_row} steps in a row since step {began}; weights "
                f"are probably useless. The last checkpoint before step {began} was kept: remove the newer ones, "
                "lower the learning rate or look at the data there, and start again; or raise max_skipped"
            )


def _copied(cells: Sequence[Tensor]) -> tuple[Tensor, torch.Event | None]:
    """Copy all cells to the host in one row, in the current stream; the event passes when it is there."""
    device = cells[0].device
    values = torch.cat([tensor.flatten().to(wide_dtype(tensor.device)) for tensor in cells])
    if device.type == "cpu":
        return values, None
    current = torch.accelerator.current_stream(device)
    if device.type != "mps":  # which has one stream
        for cell in cells:
            # Cells of another stream: the allocator would give their memory away while this one still reads it.
            cell.record_stream(current)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.Event(device)
    copied.record(current)
    return host, copied


def _filled(tables: Mapping[str, Table], cells: Tensor) -> dict[str, Table]:
    """Fill tables with their values from the host: all cells, one table after the other."""
    parts = torch.split(cells, [table.values.numel() for table in tables.values()])
    pairs = zip(tables.items(), parts, strict=True)
    return {name: replace(table, values=part.view(table.values.shape)) for (name, table), part in pairs}
