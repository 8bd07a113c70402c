"""Functions of full tensors in a state graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.graph.base import Effect, Mapper, Scope
from d9d_weights.graph.expressions import Source, TensorSource, Value

__all__ = ["Compute"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Function of full tensors and its inputs, shared by the :class:`Computed` values of all its results.

    Each of these values runs the function when it is read.
    """

    function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    inputs: Mapping[str, Value]
    label: str

    def run(self, find: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Compute the full input tensors, and call the function with them."""
        return self.function({name: value.tensor(find) for name, value in self.inputs.items()})


@dataclass(frozen=True, slots=True)
class Computed(Value):
    """Result of a function of full tensors; even a window of it needs all inputs in full."""

    call: Call
    output: str
    spec: TensorSpec

    @property
    def parts(self) -> tuple[Value, ...]:
        return tuple(self.call.inputs.values())

    @property
    def keeps_rows(self) -> bool:
        return False

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        made = self.call.run(find)[self.output]
        found = TensorSpec(tuple(made.shape), made.dtype)
        if found != self.spec:
            raise CheckpointError(
                f"{self.text()} returned {found}, but 'shapes' declares {self.spec}; correct 'shapes'"
            )
        return made

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        known: dict[str, Tensor] = {}
        specs: dict[str, TensorSpec] = {s.name: s.spec for s in _leaves(self)}

        def find(name: str) -> Tensor:
            if name not in known:
                known[name] = torch.empty(specs[name].shape, dtype=specs[name].dtype)
                source.read(name, [0] * known[name].ndim, known[name])
            return known[name]

        window: Any = tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))
        into.copy_(self.tensor(find)[window])

    def text(self) -> str:
        return f"{self.call.label}({', '.join(value.text() for value in self.call.inputs.values())}).{self.output}"


def _leaves(value: Value) -> Iterator[Source]:
    if isinstance(value, Source):
        yield value
    for part in value.parts:
        yield from _leaves(part)


@dataclass(frozen=True)
class Compute(Mapper):
    """Mapper that computes any function of full tensors, for example merging an adapter into its weight.

    Attributes:
        inputs: names of the tensors that the mapper takes.
        function: function from named input tensors to named results; deterministic, does not change its arguments.
        shapes: the same function on shapes and dtypes, called before tensors are read.
        undo: inverse mapper, if there is one.
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
            raise CheckpointError(
                f"Compute of {', '.join(self.inputs)} has no inverse; give the inverse mapper as its argument 'undo'"
            )
        return self.undo
