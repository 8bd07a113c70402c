"""Mappers between one tensor and several tensors whose indices alternate in it, such as gate and up columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.graph.base import Effect, Mapper, Scope
from d9d_weights.graph.expressions import TensorSource, Unary, Value
from d9d_weights.graph.merging import check_alike

__all__ = ["Deinterleave", "Interleave"]


@dataclass(frozen=True, slots=True)
class Strided(Unary):
    """Every ``step``-th index of dimension ``dim`` of a value, from ``start``; ``step`` divides the size of ``dim``."""

    of: Value
    dim: int
    start: int
    step: int
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = list(self.of.spec.shape)
        shape[self.dim] //= self.step
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of.spec.dtype))

    @property
    def keeps_rows(self) -> bool:
        return self.dim > 0 and self.of.keeps_rows

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return _every(self.of.tensor(find), self.dim, self.start, self.step)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        if not into.numel():
            return
        # Files are read by adjacent ranges, so the indices in between are read too.
        moved, shape = [*offset], [*into.shape]
        moved[self.dim] = offset[self.dim] * self.step
        shape[self.dim] *= self.step
        whole = torch.empty(shape, dtype=into.dtype)
        self.of.read(source, moved, whole)
        into.copy_(_every(whole, self.dim, self.start, self.step))

    def text(self) -> str:
        return f"{self.of.text()}[{':, ' * self.dim}{self.start}::{self.step}]"


@dataclass(frozen=True, slots=True)
class Interleaved(Value):
    """Values of equal shape whose indices alternate along a dimension."""

    of: tuple[Value, ...]
    dim: int
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = list(self.of[0].spec.shape)
        shape[self.dim] *= len(self.of)
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of[0].spec.dtype))

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.of

    @property
    def keeps_rows(self) -> bool:
        return False

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        stacked = torch.stack([part.tensor(find) for part in self.of], self.dim + 1)
        return stacked.flatten(self.dim, self.dim + 1)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        first, count = offset[self.dim], len(self.of)
        for index, part in enumerate(self.of):
            skipped = (index - first) % count  # indices of other parts before the first one of this part
            mine = _every(into, self.dim, skipped, count)
            moved = [*offset]
            moved[self.dim] = (first + skipped) // count
            if mine.numel():
                part.read(source, moved, mine)

    def text(self) -> str:
        return f"interleave({', '.join(part.text() for part in self.of)}; {self.dim})"


@dataclass(frozen=True)
class Deinterleave(Mapper):
    """Mapper that splits a tensor into results whose indices alternate along a dimension.

    Attributes:
        name: name of the tensor.
        to: names of the results: index i of the dimension belongs to result ``i % len(to)``.
        dim: index of the dimension, from 0.
    """

    name: str
    to: Sequence[str]
    dim: int = 0

    def apply(self, scope: Scope) -> Effect:
        label = f"Deinterleave('{self.name}')"
        effect = Effect({self.name: label})
        if not scope.are_targets(self.to, label):
            return effect
        for value in scope.find([self.name], label) or ():
            shape = value.spec.shape
            if not 0 <= self.dim < len(shape) or shape[self.dim] % len(self.to):
                scope.complain(
                    f"{label}: dimension {self.dim} of {list(shape)} does not alternate {len(self.to)} tensors"
                )
                continue
            for start, target in enumerate(self.to):
                effect.made[target] = _strided(value, self.dim, start, len(self.to))
        return effect

    def inverse(self) -> Mapper:
        return Interleave(self.to, self.name, self.dim)


@dataclass(frozen=True)
class Interleave(Mapper):
    """Inverse of :class:`Deinterleave`: mapper to one tensor in which the indices of several tensors alternate.

    Attributes:
        names: names of the tensors, in order; they have equal shapes.
        to: name of the result.
        dim: index of the dimension, from 0.
    """

    names: Sequence[str]
    to: str
    dim: int = 0

    def apply(self, scope: Scope) -> Effect:
        label = f"Interleave('{self.to}')"
        effect = Effect(dict.fromkeys(self.names, label))
        values = scope.find(self.names, label)
        if values == []:
            scope.complain(f"{label} needs at least one tensor")
        if values and check_alike(scope, label, self.names, values, None):
            if not 0 <= self.dim < len(shape := values[0].spec.shape):
                scope.complain(f"{label}: tensors of the shape {list(shape)} have no dimension {self.dim}")
            else:
                effect.made[self.to] = _interleaved(values, self.dim)
        return effect

    def inverse(self) -> Mapper:
        return Deinterleave(self.to, self.names, self.dim)


def _every(tensor: Tensor, dim: int, start: int, step: int) -> Tensor:
    window: tuple[slice, ...] = (*(slice(None),) * dim, slice(start, None, step))
    return tensor[window]


def _strided(value: Value, dim: int, start: int, step: int) -> Value:
    """Every ``step``-th index of a value; if it interleaves ``step`` values, this is the ``start``-th of them."""
    if isinstance(value, Interleaved) and value.dim == dim and len(value.of) == step:
        return value.of[start]
    return Strided(value, dim, start, step)


def _interleaved(values: Sequence[Value], dim: int) -> Value:
    """Interleaving of values; the original value if they are all its strided parts, in order."""
    count, first = len(values), values[0]
    if isinstance(first, Strided):
        whole = first.of
        if list(values) == [Strided(whole, dim, start, count) for start in range(count)]:
            return whole
    return Interleaved(tuple(values), dim)
