"""Base class of metrics whose state consists of named sums, maxima and minima."""

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
    """Declaration of one tensor in a metric's state.

    Attributes:
        operation: how a new value is combined with the total, and how totals are merged over ranks.
        shape: shape of the tensor; 0-d by default.
        dtype: dtype of the tensor. ``float64`` becomes ``float32`` on devices without float64. Use ``int64`` for
            counts, because float32 is inexact above 16,777,216.
    """

    operation: Operation = "sum"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    def neutral(self) -> Tensor:
        """Tensor of initial values, neutral in a merge: zeros for ``sum``, or the dtype's lowest or highest value."""
        return torch.full(self.shape, _start(self.dtype, self.operation), dtype=self.dtype)


class AccumulatedMetric:
    """Base class of a metric (:class:`d9d_core.metric.Metric`) whose whole state consists of accumulators.

    A subclass declares its accumulators and implements ``update`` and ``compute``; :mod:`d9d_core.metric` has an
    example.

    Args:
        accumulators: name -> accumulator.
    """

    def __init__(self, **accumulators: Accumulator) -> None:
        self._accumulators = accumulators
        self._state = {name: one.neutral() for name, one in accumulators.items()}

    @property
    def reductions(self) -> Mapping[str, Operation]:
        """Reduction of each accumulator over ranks."""
        return {name: one.operation for name, one in self._accumulators.items()}

    def accumulate(self, **values: Tensor | float) -> None:
        """Combine a value with each named accumulator: add the value, or keep the larger or smaller of the two.

        The state moves to the device of the values. The call does not synchronize with the device.

        Args:
            values: accumulator name -> 0-d tensor, tensor of the accumulator's shape, or number. Numbers are placed on
                the device of the tensors.

        Raises:
            JobError: a tensor is neither 0-d nor of its accumulator's shape.
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
        """Name -> accumulated tensor."""
        return dict(self._state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the accumulated tensors by saved or merged tensors."""
        self._state = {name: state[name] for name in self._state}

    def reset(self) -> None:
        """Set every accumulator to its initial value; its device stays the same, because a move would synchronize."""
        for name, one in self._accumulators.items():
            total = self._state[name]
            self._state[name] = torch.full_like(total, _start(total.dtype, one.operation))


def _start(dtype: torch.dtype, operation: Operation) -> float:
    """Initial value of an accumulator; merging it with another value gives the other value."""
    if operation == "sum":
        return 0
    if dtype.is_floating_point:
        return -torch.inf if operation == "max" else torch.inf
    limits = torch.iinfo(dtype)
    return limits.min if operation == "max" else limits.max


def _dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return wide_dtype(device) if dtype == torch.float64 else dtype
