"""Base of metrics whose state is named sums, maxima and minima."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from d9d_core.errors import JobError
from d9d_core.tensors import wide_dtype

__all__ = ["AccumulatedMetric", "Accumulator"]

Operation = Literal["sum", "max", "min"]
_OPERATIONS: Mapping[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Accumulator of one tensor of a metric's state.

    Attributes:
        operation: how values are taken in, and merged over ranks.
        shape: of the tensor; 0-d by default.
        dtype: ``float64`` becomes ``float32`` on devices that have no wider floats; counts are ``int64``, which stay
            exact where float32 stops at 16,777,216.
    """

    operation: Operation = "sum"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    def neutral(self) -> Tensor:
        """Tensor that changes nothing when it is merged: zeros, or the least or greatest value of the dtype."""
        return torch.full(self.shape, _start(self.dtype, self.operation), dtype=self.dtype)


class AccumulatedMetric:
    """Base class of a metric (:class:`d9d_core.metric.Metric`) whose whole state is accumulators.

    A subclass names its accumulators, and writes ``update`` and ``compute``; :mod:`d9d_core.metric` has an example.

    Args:
        accumulators: by name.
    """

    def __init__(self, **accumulators: Accumulator) -> None:
        self._accumulators = accumulators
        self._state = {name: one.neutral() for name, one in accumulators.items()}

    @property
    def reductions(self) -> Mapping[str, Operation]:
        """Reduction of each accumulator over ranks."""
        return {name: one.operation for name, one in self._accumulators.items()}

    def accumulate(self, **values: Tensor | float) -> None:
        """Take in a value for each of these accumulators: add it, or keep the larger or smaller one.

        The state moves to the device of the values. Nothing waits for it.

        Args:
            values: tensors of the accumulator's shape, or 0-d ones; or numbers, which go where the tensors are.

        Raises:
            JobError: a tensor has another shape than its accumulator.
        """
        devices = [value.device for value in values.values() if isinstance(value, Tensor)]
        for name, value in values.items():
            one, total = self._accumulators[name], self._state[name]
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=total.dtype, device=devices[0] if devices else total.device)  # noqa: PLW2901
            if value.device != total.device:
                total = total.to(value.device, _dtype_on(value.device, total.dtype), non_blocking=True)
            value = value.detach().to(total.dtype)  # noqa: PLW2901
            if value.ndim and value.shape != total.shape:
                raise JobError(
                    f"{type(self).__name__}: a value of shape {list(value.shape)} does not fit into '{name}' of shape "
                    f"{list(total.shape)}; reduce it first"
                )
            self._state[name] = _OPERATIONS[one.operation](total, value)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def state(self) -> dict[str, Tensor]:
        """Accumulated tensors by name."""
        return dict(self._state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved or merged tensors."""
        self._state = {name: state[name] for name in self._state}

    def reset(self) -> None:
        """Begin anew. Tensors stay on their device, because moving them there again would wait for it."""
        for name, one in self._accumulators.items():
            total = self._state[name]
            self._state[name] = torch.full_like(total, _start(total.dtype, one.operation))


def _start(dtype: torch.dtype, operation: Operation) -> float:
    """Value that changes nothing when it is merged."""
    if operation == "sum":
        return 0
    if dtype.is_floating_point:
        return -torch.inf if operation == "max" else torch.inf
    limits = torch.iinfo(dtype)
    return limits.min if operation == "max" else limits.max


def _dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return wide_dtype(device) if dtype == torch.float64 else dtype
