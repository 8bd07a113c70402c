"""From device tensors to logged values, a few steps later and without waiting for the GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from d9d_core.errors import NonFiniteError
from d9d_core.loop.events import StepResult
from d9d_core.topology.devices import wide_dtype

#: Steps the host may be ahead of the values it has seen.
MAX_PENDING = 2


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    names: tuple[str, ...]
    values: Tensor  # [names], on the host once `copied` has passed
    copied: torch.Event | None
    host: Mapping[str, float] | None  # None: this step is watched, not logged


class Logbook:
    """Watches every step and logs some.

    All ranks read the values of a step after the same later step, so that what follows from them (an error, a stop)
    happens everywhere at once.

    Args:
        write: gets the step (1-based) and the values of a step to be logged.
        watch: gets the step (1-based) and the loss of every step.
        nonfinite: what follows a step whose loss or gradient was not finite.
        skipped: how many such steps there were before.
        tokens: how many tokens were consumed before.
    """

    def __init__(
        self,
        write: Callable[[int, Mapping[str, float]], None],
        watch: Callable[[int, float], None],
        nonfinite: Literal["error", "skip"],
        skipped: int = 0,
        tokens: int = 0,
    ) -> None:
        self._write = write
        self._watch = watch
        self._nonfinite = nonfinite
        self._pending: deque[_Entry] = deque()
        self.skipped = skipped
        self.tokens = tokens
        self.stop = False

    def record(
        self,
        step: int,
        result: StepResult,
        logged: Mapping[str, float] | None,
        measured: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take in a step; older steps whose values have arrived are written.

        Args:
            step: 1-based.
            result: device tensors.
            logged: host values to log with it; ``None`` if the step is not logged.
            measured: further 0-d device tensors to log.

        Raises:
            NonFiniteError: an earlier step was not finite and the policy is ``error``.
        """
        tensors = {name: getattr(result, name) for name in ("finite", "stop", "tokens", "loss", "grad_norm")}
        if logged is not None:
            several = len(result.terms) > 1
            tensors |= {f"loss/{term}": mean for term, mean in result.terms.items()} if several else {}
            tensors |= measured or {}
        values = torch.stack([tensor.to(wide_dtype(tensor.device)) for tensor in tensors.values()])
        copied = None
        if values.device.type != "cpu":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            copied = torch.Event(tensors["loss"].device)
            copied.record()
        self._pending.append(_Entry(step, tuple(tensors), values, copied, logged))
        limit = MAX_PENDING if copied is not None else 0
        while len(self._pending) > limit:  # not: as far as copied, which differs between ranks
            self._take(self._pending.popleft())

    def drain(self) -> None:
        """Wait for all values; afterwards every step so far is known to be finite (or skipped).

        Raises:
            NonFiniteError: one was not and the policy is ``error``.
        """
        while self._pending:
            self._take(self._pending.popleft())

    def _take(self, entry: _Entry) -> None:
        if entry.copied is not None:
            entry.copied.synchronize()
        values = dict(zip(entry.names, entry.values.tolist(), strict=True))
        if not values.pop("finite"):
            self._meet_nonfinite(entry.step, values)
        self.stop = self.stop or bool(values.pop("stop"))
        self.tokens += round(values.pop("tokens"))
        self._watch(entry.step, values["loss"])
        if entry.host is not None:
            extra = {"skipped_steps": float(self.skipped)} if self.skipped else {}
            self._write(entry.step, {**values, "tokens": float(self.tokens), **entry.host, **extra})

    def _meet_nonfinite(self, step: int, values: Mapping[str, float]) -> None:
        self.skipped += 1
        if self._nonfinite == "error":
            names = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
            what = " and ".join(f"{name} is {values[name]}" for name in names)
            raise NonFiniteError(
                f"step {step}: {what}; this step changed nothing. Look at its data, lower the learning rate, "
                "or set 'nonfinite: skip' to go on without such steps"
            )
