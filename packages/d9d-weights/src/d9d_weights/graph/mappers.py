"""Mappers of one tensor at a time. Where a name is asked for, a pattern will do: ``layers.{layer}.norm.weight``."""

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
    """Pattern: a name in which ``{word}`` stands for one component and ``{word*}`` for one or more of them.

    Attributes:
        text: the name.
    """

    text: str

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Placeholders: the words in braces."""
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
        """Words that the placeholders stand for in this name, if it fits."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, placeholders: dict[str, str]) -> str:
        """Name with words in place of the placeholders."""
        return _PLACE.sub(lambda match: placeholders[match[1]], self.text)


class PerTensor(Mapper):
    """Base of mappers that take each tensor that fits a name or pattern, and make one of it.

    Subclasses are frozen dataclasses that have the fields ``name``, ``to`` (by default the same) and ``optional``.
    """

    name: str
    to: str | None = None
    optional: bool = False

    @abstractmethod
    def change(self, value: Value) -> Value:
        """Change a value into the one that is made of it.

        Raises:
            ValueError: its shape does not allow that; the text says why.
        """

    @cached_property
    def _patterns(self) -> tuple[Pattern, Pattern]:
        """Old and new name as patterns."""
        return Pattern(self.name), Pattern(self.to or self.name)

    def label(self) -> str:
        """Name of this mapper in messages."""
        return f"{type(self).__name__}('{self.name}')"

    def apply(self, scope: Scope) -> Effect:
        effect = Effect()
        pattern, target = self._patterns
        if pattern.placeholders != target.placeholders:
            scope.complain(f"{self.label()}: '{self.to}' has other placeholders in braces, so its names are not known")
            return effect
        for source, made in self._matches(scope):
            effect.taken[source] = self.label()
            if made in effect.made:
                scope.complain(f"{self.label()} makes '{scope.path}{made}' twice, the second time of '{source}'")
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
            scope.complain(f"{self.label()} fits no name that starts with '{scope.path}'")


@dataclass(frozen=True)
class Identity(Mapper):
    """Mapper that keeps tensors as they are: those named, or all that its neighbours leave.

    Attributes:
        names: which; none means the rest.
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
    """Mapper that gives a tensor another name.

    Attributes:
        name: the old one, or a pattern.
        to: the new one, with the same placeholders.
        optional: whether it may be absent.
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
        name: of the tensor, or a pattern.
        dims: dimension ``k`` of the result is ``dims[k]`` of the original; the last two swapped by default.
        to: new name, by default the same.
        optional: whether it may be absent.
    """

    name: str
    dims: tuple[int, ...] | None = None
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        ndim = len(value.spec.shape)
        dims = self.dims or (*range(ndim - 2), ndim - 1, ndim - 2)
        if ndim < 2 or sorted(dims) != list(range(ndim)):
            raise ValueError(f"its dimensions cannot be ordered as {dims}")
        return permuted(value, dims)

    def inverse(self) -> Mapper:
        dims = self.dims and tuple(self.dims.index(dim) for dim in range(len(self.dims)))
        return Transpose(self.to or self.name, dims, self.name, self.optional)


@dataclass(frozen=True)
class Squeeze(PerTensor):
    """Mapper that removes a dimension of size one.

    Attributes:
        name: of the tensor, or a pattern.
        dim: which one; counts from 0.
        to: new name, by default the same.
        optional: whether it may be absent.
    """

    name: str
    dim: int
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        if not 0 <= self.dim < len(value.spec.shape) or value.spec.shape[self.dim] != 1:
            raise ValueError(f"dimension {self.dim} is not of size 1")
        return squeezed(value, self.dim)

    def inverse(self) -> Mapper:
        return Unsqueeze(self.to or self.name, self.dim, self.name, self.optional)


@dataclass(frozen=True)
class Unsqueeze(PerTensor):
    """Mapper that adds a dimension of size one.

    Attributes:
        name: of the tensor, or a pattern.
        dim: where; counts from 0.
        to: new name, by default the same.
        optional: whether it may be absent.
    """

    name: str
    dim: int
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        if not 0 <= self.dim <= len(value.spec.shape):
            raise ValueError(f"there is no position {self.dim} for a new dimension")
        return unsqueezed(value, self.dim)

    def inverse(self) -> Mapper:
        return Squeeze(self.to or self.name, self.dim, self.name, self.optional)


@dataclass(frozen=True)
class Cast(PerTensor):
    """Mapper that converts a tensor to another number format.

    Attributes:
        name: of the tensor, or a pattern.
        dtype: the new one.
        back: the old one, if the inverse is wanted.
        to: new name, by default the same.
        optional: whether it may be absent.
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
            raise CheckpointError(f"{self.label()} has no inverse: give the original number format as 'back'")
        return Cast(self.to or self.name, self.back, self.dtype, self.name, self.optional)


@dataclass(frozen=True)
class Gather(PerTensor):
    """Gather a tensor that is sharded over ranks. Collective over its mesh when it is computed.

    Attributes:
        name: of the tensor, or a pattern.
        to: new name, by default the same.
        optional: whether it may be absent.
    """

    name: str
    to: str | None = None
    optional: bool = False

    def change(self, value: Value) -> Value:
        return Whole(value)

    def inverse(self) -> Mapper:
        raise CheckpointError(f"{self.label()} has no inverse: say with Distribute how the tensor is sharded")


@dataclass(frozen=True)
class Distribute(PerTensor):
    """Mapper that shards a tensor over a mesh: each rank computes its shard of a DTensor. Must come last.

    Attributes:
        name: of the tensor, or a pattern.
        mesh: ranks.
        placements: one for each dimension of the mesh.
        to: new name, by default the same.
        optional: whether it may be absent.
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
