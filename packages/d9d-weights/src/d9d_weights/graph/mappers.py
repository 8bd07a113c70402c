"""Mappers of one tensor at a time. A name may be a pattern: ``layers.{layer}.norm.weight``."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from d9d_core.errors import CheckpointError
from torch.distributed.device_mesh import DeviceMesh

from d9d_weights.graph.base import Effect, Mapper, Scope
from d9d_weights.graph.expressions import Placed, Value, Whole
from d9d_weights.graph.simplify import converted, permuted, squeezed, unsqueezed

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

__all__ = ["Cast", "Distribute", "Gather", "Identity", "Rename", "Squeeze", "Transpose", "Unsqueeze"]

_PLACE = re.compile(r"\{(\w+)(\*?)\}")


@dataclass(frozen=True)
class Pattern:
    """Name in which ``{word}`` stands for one component and ``{word*}`` for one or more components.

    Attributes:
        text: the name with placeholders.
    """

    text: str

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Placeholders of the pattern: the words in braces."""
        return frozenset(word for word, _ in _PLACE.findall(self.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end = [], 0
        seen: set[str] = set()
        for match in _PLACE.finditer(self.text):
            parts.append(re.escape(self.text[end : match.start()]))
            word, long = match.groups()
            parts.append(f"(?P={word})" if word in seen else f"(?P<{word}>{'.+' if long else '[^.]+'})")
            seen.add(word)
            end = match.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]))

    def match(self, name: str) -> dict[str, str] | None:
        """Components of a name that the placeholders stand for, by placeholder; ``None`` if the name does not match."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, placeholders: dict[str, str]) -> str:
        """Name that results if the placeholders are replaced by components."""
        return _PLACE.sub(lambda match: placeholders[match[1]], self.text)


class PerTensor(Mapper):
    """Base of mappers that take each tensor that matches a name or pattern and return one result for it.

    Subclasses are frozen dataclasses with the fields ``name``, ``to`` (by default the same name) and ``optional``.
    """

    name: str
    to: str | None = None
    optional: bool = False

    @abstractmethod
    def change(self, value: Value) -> Value:
        """Return the result for one value.

        Raises:
            ValueError: the value's shape is not possible; the text gives the reason.
        """

    @cached_property
    def _patterns(self) -> tuple[Pattern, Pattern]:
        """Old name and new name, as patterns."""
        return Pattern(self.name), Pattern(self.to or self.name)

    def label(self) -> str:
        """Name of this mapper in messages."""
        return f"{type(self).__name__}('{self.name}')"

    def apply(self, scope: Scope) -> Effect:
        effect = Effect()
        pattern, target = self._patterns
        if pattern.placeholders != target.placeholders:
            scope.complain(f"{self.label()}: '{self.to}' has other placeholders in braces, so names cannot be derived")
            return effect
        for source, made in self._matches(scope):
            effect.taken[source] = self.label()
            if made in effect.made:
                scope.complain(f"{self.label()} makes '{scope.path}{made}' twice, the second time from '{source}'")
            try:
                effect.made[made] = self.change(scope.values[source])
            except ValueError as error:
                shape = list(scope.values[source].spec.shape)
                scope.complain(f"{self.label()}: '{scope.path}{source}' has the shape {shape}: {error}")
        return effect

    def _matches(self, scope: Scope) -> Iterator[tuple[str, str]]:
        pattern, target = self._patterns
        if not pattern.placeholders:
            if not self.optional or self.name in scope.values:
                for _ in scope.find([self.name], self.label()) or ():
                    yield self.name, target.text
            return
        found = False
        for name in scope.values:
            placeholders = pattern.match(name)
            if placeholders is not None:
                found = True
                yield name, target.fill(placeholders)
        if not found and not self.optional:
            scope.complain(
                f"{self.label()} matches no name" + (f" that starts with '{scope.path}'" if scope.path else "")
            )


@dataclass(frozen=True)
class Identity(Mapper):
    """Mapper that keeps tensors unchanged: the named tensors, or all that the other mappers do not take.

    Attributes:
        names: names of the tensors; empty for all remaining tensors.
    """

    names: tuple[str, ...] = ()

    def apply(self, scope: Scope) -> Effect:
        names = self.names or tuple(scope.values)
        values = scope.find(names, "Identity") or []
        return Effect(dict.fromkeys(names, "Identity"), dict(zip(names, values, strict=False)))

    def inverse(self) -> Mapper:
        return self

    def rest(self) -> bool:
        return not self.names


@dataclass(frozen=True)
class Rename(PerTensor):
    """Mapper that renames a tensor.

    Attributes:
        name: old name, or a pattern.
        to: new name, with the same placeholders.
        optional: whether the tensor may be absent.
    """

    name: str
    to: str
    optional: bool = False

    def __post_init__(self) -> None:
        pattern, target = self._patterns
        if pattern.placeholders != target.placeholders:
            raise CheckpointError(f"Rename: '{self.name}' and '{self.to}' have different placeholders in braces")

    def change(self, value: Value) -> Value:
        return value

    def inverse(self) -> Mapper:
        return Rename(self.to, self.name, self.optional)


@dataclass(frozen=True)
class Transpose(PerTensor):
    """Mapper that reorders the dimensions of a tensor.

    Attributes:
        name: name of the tensor, or a pattern.
        dims: dimension ``k`` of the result is dimension ``dims[k]`` of the original; by default, the last two are
            swapped.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    dims: tuple[int, ...] | None = None
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        ndim = len(value.spec.shape)
        dims = self.dims or (*range(ndim - 2), ndim - 1, ndim - 2)
        if ndim < 2 or sorted(dims) != list(range(ndim)):
            raise ValueError(f"dims {dims} is not a permutation of the tensor's {ndim} dimensions")
        return permuted(value, dims)

    def inverse(self) -> Mapper:
        dims = self.dims and tuple(self.dims.index(dim) for dim in range(len(self.dims)))
        return Transpose(self.to or self.name, dims, self.name, self.optional)


@dataclass(frozen=True)
class Squeeze(PerTensor):
    """Mapper that removes a dimension of size one.

    Attributes:
        name: name of the tensor, or a pattern.
        dim: index of the dimension, from 0.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    dim: int
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        if not 0 <= self.dim < len(value.spec.shape) or value.spec.shape[self.dim] != 1:
            raise ValueError(f"dimension {self.dim} of the tensor {list(value.spec.shape)} is not of size 1")
        return squeezed(value, self.dim)

    def inverse(self) -> Mapper:
        return Unsqueeze(self.to or self.name, self.dim, self.name, self.optional)


@dataclass(frozen=True)
class Unsqueeze(PerTensor):
    """Mapper that adds a dimension of size one.

    Attributes:
        name: name of the tensor, or a pattern.
        dim: index of the new dimension, from 0.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    dim: int
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        if not 0 <= self.dim <= len(value.spec.shape):
            raise ValueError(f"a new dimension of the tensor {list(value.spec.shape)} cannot have index {self.dim}")
        return unsqueezed(value, self.dim)

    def inverse(self) -> Mapper:
        return Squeeze(self.to or self.name, self.dim, self.name, self.optional)


@dataclass(frozen=True)
class Cast(PerTensor):
    """Mapper that converts a tensor to another dtype.

    Attributes:
        name: name of the tensor, or a pattern.
        dtype: new dtype.
        back: old dtype, needed for the inverse.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    dtype: torch.dtype
    back: torch.dtype | None = None
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        return converted(value, self.dtype)

    def inverse(self) -> Mapper:
        if self.back is None:
            raise CheckpointError(f"{self.label()} has no inverse; give the original dtype as its argument 'back'")
        return Cast(self.to or self.name, self.back, self.dtype, self.name, self.optional)


@dataclass(frozen=True)
class Gather(PerTensor):
    """Mapper that gathers a tensor sharded over ranks. Computing the result is collective over its mesh.

    Attributes:
        name: name of the tensor, or a pattern.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        return Whole(value)

    def inverse(self) -> Mapper:
        raise CheckpointError(f"{self.label()} has no inverse; use Distribute, which declares the sharding, instead")


@dataclass(frozen=True)
class Distribute(PerTensor):
    """Mapper that shards a tensor over a mesh: each rank computes its shard of a DTensor. Must come last.

    Attributes:
        name: name of the tensor, or a pattern.
        mesh: device mesh.
        placements: one placement for each dimension of the mesh.
        to: new name; by default the same.
        optional: whether the tensor may be absent.
    """

    name: str
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        return Placed(value, self.mesh, self.placements)

    def inverse(self) -> Mapper:
        return Gather(self.to or self.name, self.name, self.optional)
