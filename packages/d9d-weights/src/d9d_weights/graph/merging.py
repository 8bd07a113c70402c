"""Mappers that merge several tensors into one, or split one tensor into several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from d9d_weights.graph.base import Effect, Mapper, Scope
from d9d_weights.graph.expressions import Value
from d9d_weights.graph.simplify import joined, sliced, squeezed, unsqueezed

__all__ = ["Chunk", "Concatenate", "Stack", "Unstack"]


@dataclass(frozen=True)
class Stack(Mapper):
    """Mapper that stacks tensors of equal shape along a new dimension.

    Attributes:
        names: names of the tensors, in order.
        to: name of the result.
        dim: index of the new dimension, from 0.
    """

    names: Sequence[str]
    to: str
    dim: int = 0

    def apply(self, scope: Scope) -> Effect:
        label = f"Stack('{self.to}')"
        effect = Effect(dict.fromkeys(self.names, label))
        values = scope.find(self.names, label)
        if values == []:
            scope.complain(f"{label} needs at least one tensor")
        if values and check_alike(scope, label, self.names, values, None):
            if not 0 <= self.dim <= len(values[0].spec.shape):
                shape = list(values[0].spec.shape)
                scope.complain(
                    f"{label}: tensors of the shape {shape} cannot be stacked along a new dimension {self.dim}"
                )
            else:
                effect.made[self.to] = joined([unsqueezed(value, self.dim) for value in values], self.dim)
        return effect

    def inverse(self) -> Mapper:
        return Unstack(self.to, self.names, self.dim)


@dataclass(frozen=True)
class Unstack(Mapper):
    """Inverse of :class:`Stack`: mapper that splits a tensor into one result per index of a dimension.

    Attributes:
        name: name of the tensor.
        to: names of the results, in order.
        dim: index of the dimension, from 0.
    """

    name: str
    to: Sequence[str]
    dim: int = 0

    def apply(self, scope: Scope) -> Effect:
        label = f"Unstack('{self.name}')"
        effect = Effect({self.name: label})
        if not scope.are_targets(self.to, label):
            return effect
        for value in scope.find([self.name], label) or ():
            shape = value.spec.shape
            if not 0 <= self.dim < len(shape) or shape[self.dim] != len(self.to):
                scope.complain(f"{label} cannot make {len(self.to)} tensors from dimension {self.dim} of {list(shape)}")
                continue
            for index, target in enumerate(self.to):
                effect.made[target] = squeezed(sliced(value, self.dim, index, 1), self.dim)
        return effect

    def inverse(self) -> Mapper:
        return Stack(self.to, self.name, self.dim)


@dataclass(frozen=True)
class Concatenate(Mapper):
    """Mapper that concatenates tensors along a dimension.

    Attributes:
        names: names of the tensors, in order.
        to: name of the result.
        dim: index of the dimension, from 0.
        sizes: size of each tensor along the dimension; the inverse needs them unless they are equal.
    """

    names: Sequence[str]
    to: str
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apply(self, scope: Scope) -> Effect:
        label = f"Concatenate('{self.to}')"
        effect = Effect(dict.fromkeys(self.names, label))
        values = scope.find(self.names, label)
        if values == []:
            scope.complain(f"{label} needs at least one tensor")
        if values and check_alike(scope, label, self.names, values, self.dim):
            found = [value.spec.shape[self.dim] for value in values]
            if self.sizes is not None and found != list(self.sizes):
                scope.complain(f"{label}: dimension {self.dim} should have the sizes {list(self.sizes)}, not {found}")
            else:
                effect.made[self.to] = joined(values, self.dim)
        return effect

    def inverse(self) -> Mapper:
        return Chunk(self.to, self.names, self.dim, self.sizes)


@dataclass(frozen=True)
class Chunk(Mapper):
    """Inverse of :class:`Concatenate`: mapper that splits a tensor into consecutive parts along a dimension.

    Attributes:
        name: name of the tensor.
        to: names of the results, in order.
        dim: index of the dimension, from 0.
        sizes: size of each part; equal by default.
    """

    name: str
    to: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def apply(self, scope: Scope) -> Effect:
        label = f"Chunk('{self.name}')"
        effect = Effect({self.name: label})
        if not scope.are_targets(self.to, label):
            return effect
        for value in scope.find([self.name], label) or ():
            shape = value.spec.shape
            length = shape[self.dim] if 0 <= self.dim < len(shape) else -1
            sizes = self.sizes or [length // len(self.to)] * len(self.to)
            if sum(sizes) != length or len(sizes) != len(self.to) or min(sizes) < 0:
                wanted = f"parts of {list(self.sizes)}" if self.sizes else f"{len(self.to)} equal parts"
                scope.complain(f"{label}: dimension {self.dim} of {list(shape)} cannot be cut into {wanted}")
                continue
            start = 0
            for target, size in zip(self.to, sizes, strict=True):
                effect.made[target] = sliced(value, self.dim, start, size)
                start += size
        return effect

    def inverse(self) -> Mapper:
        return Concatenate(self.to, self.name, self.dim, self.sizes)


def check_alike(scope: Scope, label: str, names: Sequence[str], values: Sequence[Value], but: int | None) -> bool:
    """Whether dtypes and shapes are equal, except for dimension ``but``; add a problem otherwise."""

    def form(value: Value) -> tuple[object, ...]:
        shape = list(value.spec.shape)
        if but is not None and 0 <= but < len(shape):
            shape[but] = -1
        return value.spec.dtype, shape

    first = values[0]
    if but is not None and not 0 <= but < len(first.spec.shape):
        scope.complain(f"{label}: '{scope.path}{names[0]}' of {list(first.spec.shape)} has no dimension {but}")
        return False
    for name, value in zip(names, values, strict=True):
        if form(value) != form(first):
            scope.complain(
                f"{label}: '{scope.path}{name}' is {value.spec.dtype} {list(value.spec.shape)}, "
                f"'{scope.path}{names[0]}' is {first.spec.dtype} {list(first.spec.shape)}"
            )
            return False
    return True
