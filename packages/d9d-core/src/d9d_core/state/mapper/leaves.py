"""Mappers of one tensor at a time. Where a name is asked for, a pattern will do: ``layers.{layer}.norm.weight``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from d9d_core.errors import CheckpointError
from d9d_core.state.mapper.base import Effect, Mapper, Scope
from d9d_core.state.mapper.pattern import Pattern
from d9d_core.state.mapper.values import (
    Call,
    Computed,
    Placed,
    Source,
    Value,
    Whole,
    converted,
    permuted,
    squeezed,
    unsqueezed,
)
from d9d_core.traits import TensorSpec


class PerTensor(Mapper):
    """Takes each tensor that fits a name or pattern, and makes one of it.

    Subclasses are frozen dataclasses that have the fields ``name``, ``to`` (by default the same) and ``optional``.
    """

    name: str
    to: str | None = None
    optional: bool = False

    @abstractmethod
    def change(self, value: Value) -> Value:
        """What becomes of it.

        Raises:
            ValueError: its shape does not allow that; the text says why.
        """

    def label(self) -> str:
        """How messages call this leaf."""
        return f"{type(self).__name__}('{self.name}')"

    def apply(self, scope: Scope) -> Effect:
        effect = Effect()
        places, kept = (Pattern(name).places for name in (self.name, self.to or self.name))
        if places != kept:
            scope.complain(f"{self.label()}: '{self.to}' has other places in braces, so its names are not known")
            return effect
        for source, target in self._matches(scope):
            effect.taken[source] = self.label()
            if target in effect.made:
                scope.complain(f"{self.label()} makes '{scope.path}{target}' twice, the second time of '{source}'")
            try:
                effect.made[target] = self.change(scope.values[source])
            except ValueError as error:
                shape = list(scope.values[source].spec.shape)
                scope.complain(f"{self.label()}: '{scope.path}{source}' has the shape {shape}: {error}")
        return effect

    def _matches(self, scope: Scope) -> Iterator[tuple[str, str]]:
        pattern, target = Pattern(self.name), Pattern(self.to or self.name)
        if not pattern.places:
            if not self.optional or self.name in scope.values:
                for _ in scope.find([self.name], self.label()) or ():
                    yield self.name, target.text
            return
        found = False
        for name in scope.values:
            places = pattern.match(name)
            if places is not None:
                found = True
                yield name, target.fill(places)
        if not found and not self.optional:
            scope.complain(f"{self.label()} fits no name that starts with '{scope.path}'")


@dataclass(frozen=True)
class Identity(Mapper):
    """Takes tensors and leaves them as they are: those named, or all that its neighbours leave.

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
    """Another name.

    Attributes:
        name: the old one, or a pattern.
        to: the new one, with the same places.
        optional: whether it may be absent.
    """

    name: str
    to: str
    optional: bool = False

    def __post_init__(self) -> None:
        if Pattern(self.name).places != Pattern(self.to).places:
            raise CheckpointError(f"Rename: '{self.name}' and '{self.to}' have different places in braces")

    def change(self, value: Value) -> Value:
        return value

    def inverse(self) -> Mapper:
        return Rename(self.to, self.name, self.optional)


@dataclass(frozen=True)
class Transpose(PerTensor):
    """Dimensions in another order.

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
    """Without a dimension of size one.

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
    """With a new dimension of size one.

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
            raise ValueError(f"there is no place {self.dim} for a new dimension")
        return unsqueezed(value, self.dim)

    def inverse(self) -> Mapper:
        return Squeeze(self.to or self.name, self.dim, self.name, self.optional)


@dataclass(frozen=True)
class Cast(PerTensor):
    """Another number format.

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
    """The whole of a tensor that is sharded over ranks. Collective over its mesh when it is computed.

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
    """Sharded over a mesh: the result is a DTensor, of which each rank computes its part. Must be the last leaf.

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


@dataclass(frozen=True)
class Share(Mapper):
    """One tensor under several names, such as an embedding that is also the head.

    Attributes:
        name: of the tensor.
        targets: its new names; the inverse keeps the first.
    """

    name: str
    targets: tuple[str, ...]

    def apply(self, scope: Scope) -> Effect:
        label = f"Share('{self.name}')"
        values = scope.find([self.name], label) or []
        scope.are_targets(self.targets, label)
        return Effect({self.name: label}, {target: value for value in values for target in self.targets})

    def inverse(self) -> Mapper:
        from d9d_core.state.mapper.compose import Parallel

        return Parallel(Rename(self.targets[0], self.name), *(Drop(other) for other in self.targets[1:]))


@dataclass(frozen=True)
class Select(Mapper):
    """The tensors below a module, under another module: ``Select("model", "backbone")``. All others are left out.

    Attributes:
        module: name of the module, ``""`` for the model itself.
        to: its new name.
    """

    module: str
    to: str = ""

    def apply(self, scope: Scope) -> Effect:
        old, new = (f"{module}." if module else "" for module in (self.module, self.to))
        label = f"Select('{self.module}')"
        below = scope.below(old)
        if not below:
            scope.complain(f"{label} finds nothing below '{scope.path}{old}'")
        return Effect(dict.fromkeys(scope.values, label), {new + name: value for name, value in below.items()})

    def inverse(self) -> Mapper:
        return Select(self.to, self.module)


@dataclass(frozen=True)
class Drop(Mapper):
    """Takes tensors that nobody needs, such as a copy of a tied head. Its inverse does nothing.

    Attributes:
        name: of the tensor, or a pattern.
        optional: whether it may be absent.
    """

    name: str
    optional: bool = False

    def apply(self, scope: Scope) -> Effect:
        label = f"Drop('{self.name}')"
        pattern = Pattern(self.name)
        if not pattern.places:
            absent = self.optional and self.name not in scope.values
            taken = [self.name] if not absent and scope.find([self.name], label) else []
        else:
            taken = [name for name in scope.values if pattern.match(name) is not None]
            if not taken and not self.optional:
                scope.complain(f"{label} fits no name that starts with '{scope.path}'")
        return Effect(dict.fromkeys(taken, label))

    def inverse(self) -> Mapper:
        return _Nothing()


@dataclass(frozen=True)
class Fresh(Mapper):
    """Names that the checkpoint does not hold on purpose, such as a new head: they stay as they were initialised.

    Attributes:
        names: of the tensors.
    """

    names: tuple[str, ...]

    def apply(self, scope: Scope) -> Effect:  # noqa: ARG002 - takes nothing
        return Effect(fresh=dict.fromkeys(self.names, "Fresh"))

    def inverse(self) -> Mapper:
        from d9d_core.state.mapper.compose import Parallel

        return Parallel(*(Drop(name) for name in self.names))


class _Nothing(Mapper):
    def apply(self, scope: Scope) -> Effect:  # noqa: ARG002 - takes nothing
        return Effect()

    def inverse(self) -> Mapper:
        return self


@dataclass(frozen=True)
class Compute(Mapper):
    """Any function of whole tensors, such as folding an adapter into its weight.

    Attributes:
        inputs: names it takes.
        function: from tensors by these names to tensors by new names; deterministic, leaves its arguments alone.
        shapes: the same for shapes and dtypes, called before anything is read.
        undo: the mapper that undoes it, if there is one.
    """

    inputs: tuple[str, ...]
    function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    shapes: Callable[[Mapping[str, TensorSpec]], Mapping[str, TensorSpec]]
    undo: Mapper | None = None

    def apply(self, scope: Scope) -> Effect:
        label: Any = getattr(self.function, "__name__", type(self.function).__name__)
        values = scope.find(self.inputs, label)
        if values is None:
            return Effect(dict.fromkeys(self.inputs, label))
        named = dict(zip(self.inputs, values, strict=True))
        specs = self.shapes({name: value.spec for name, value in named.items()})
        call = Call(self.function, named, label)
        return Effect(
            dict.fromkeys(self.inputs, label), {name: Computed(call, name, spec) for name, spec in specs.items()}
        )

    def inverse(self) -> Mapper:
        if self.undo is None:
            raise CheckpointError(f"the function over {', '.join(self.inputs)} has no inverse: give it as 'undo'")
        return self.undo


def source_values(specs: Mapping[str, TensorSpec]) -> dict[str, Value]:
    """The tensors of a checkpoint as values."""
    return {name: Source(name, spec) for name, spec in specs.items()}


def ends_placed(value: Value) -> bool:
    """Whether sharding, if any, comes last."""
    inner: Sequence[Value] = value.parts
    return all(not isinstance(part, Placed) and ends_placed(part) for part in inner)
