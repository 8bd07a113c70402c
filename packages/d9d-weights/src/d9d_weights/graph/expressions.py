"""Expressions of tensors that are described but not read: each element of an output is traced to its source.

A value has a shape and dtype (``spec``), and can compute the full tensor (:meth:`Value.tensor`) or a window of it
(:meth:`Value.read`), which reads only windows of its own inputs. A rank that holds one shard of a parameter therefore
reads only the bytes of this shard, whatever operations are between file and parameter.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from d9d_core.tensors import full
from d9d_core.types import TensorSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class TensorSource(Protocol):
    """Source from which tensors are read by windows."""

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        """Fill ``into`` with the window at ``offset`` of the shape of ``into``, converted to the dtype of ``into``."""
        ...


class Value(ABC):
    """Expression for a tensor that is not computed yet."""

    spec: TensorSpec

    @property
    @abstractmethod
    def parts(self) -> tuple[Value, ...]:
        """Values that this value is computed from."""

    @abstractmethod
    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        """Compute the full tensor from full sources, as a view if possible. Collective if a tensor is gathered."""

    @abstractmethod
    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        """Fill ``into`` with the window at ``offset`` of the shape of ``into``, from windows of the source."""

    @abstractmethod
    def text(self) -> str:
        """Formula of the value as text, with the names of its sources."""

    def sources(self) -> list[str]:
        """Names of the source tensors of the value, in order, each once."""
        return list(dict.fromkeys(_sources(self)))

    @property
    def keeps_rows(self) -> bool:
        """Whether adjacent rows of the tensor come from adjacent bytes of the source."""
        return all(part.keeps_rows for part in self.parts)


def _sources(value: Value) -> Iterator[str]:
    if isinstance(value, Source):
        yield value.name
    for part in value.parts:
        yield from _sources(part)


@dataclass(frozen=True, slots=True)
class Source(Value):
    """Value that is a tensor of the checkpoint."""

    name: str
    spec: TensorSpec

    @property
    def parts(self) -> tuple[Value, ...]:
        return ()

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return find(self.name)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        source.read(self.name, offset, into)

    def text(self) -> str:
        return self.name


class Unary(Value):
    """Value computed from one other value, ``of``."""

    of: Value

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self.of,)


@dataclass(frozen=True, slots=True)
class Permuted(Unary):
    """Value with permuted dimensions: dimension ``k`` is dimension ``dims[k]`` of the original."""

    of: Value
    dims: tuple[int, ...]
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = tuple(self.of.spec.shape[dim] for dim in self.dims)
        object.__setattr__(self, "spec", TensorSpec(shape, self.of.spec.dtype))

    @property
    def keeps_rows(self) -> bool:
        return False

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return self.of.tensor(find).permute(self.dims)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        back = [self.dims.index(dim) for dim in range(len(self.dims))]
        self.of.read(source, [offset[dim] for dim in back], into.permute(back))

    def text(self) -> str:
        return f"transpose({self.of.text()}, {', '.join(map(str, self.dims))})"


@dataclass(frozen=True, slots=True)
class Unsqueezed(Unary):
    """Value with an additional dimension of size one."""

    of: Value
    dim: int
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = list(self.of.spec.shape)
        shape.insert(self.dim, 1)
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of.spec.dtype))

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return self.of.tensor(find).unsqueeze(self.dim)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        if into.numel():
            inner = [*offset[: self.dim], *offset[self.dim + 1 :]]
            self.of.read(source, inner, into.squeeze(self.dim))

    def text(self) -> str:
        return f"unsqueeze({self.of.text()}, {self.dim})"


@dataclass(frozen=True, slots=True)
class Squeezed(Unary):
    """Value without a dimension of size one."""

    of: Value
    dim: int
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = list(self.of.spec.shape)
        del shape[self.dim]
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of.spec.dtype))

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return self.of.tensor(find).squeeze(self.dim)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        self.of.read(source, [*offset[: self.dim], 0, *offset[self.dim :]], into.unsqueeze(self.dim))

    def text(self) -> str:
        return f"squeeze({self.of.text()}, {self.dim})"


@dataclass(frozen=True, slots=True)
class Sliced(Unary):
    """Slice of a value: indices ``start`` to ``start + length`` of a dimension."""

    of: Value
    dim: int
    start: int
    length: int
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        shape = list(self.of.spec.shape)
        shape[self.dim] = self.length
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of.spec.dtype))

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return self.of.tensor(find).narrow(self.dim, self.start, self.length)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        moved = [*offset]
        moved[self.dim] += self.start
        self.of.read(source, moved, into)

    def text(self) -> str:
        before = ":, " * self.dim
        return f"{self.of.text()}[{before}{self.start}:{self.start + self.length}]"


@dataclass(frozen=True, slots=True)
class Joined(Value):
    """Concatenation of several values along a dimension."""

    of: tuple[Value, ...]
    dim: int
    spec: TensorSpec = field(init=False)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = list(self.of[0].spec.shape)
        ends = tuple(itertools.accumulate(part.spec.shape[self.dim] for part in self.of))
        shape[self.dim] = ends[-1]
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "spec", TensorSpec(tuple(shape), self.of[0].spec.dtype))

    def inside(self, first: int, last: int) -> Iterator[tuple[Value, int, int, int]]:
        """Parts that overlap a range of indices, each with its start in the result and the range within the part."""
        index = bisect.bisect_right(self._ends, first)
        while first < last:
            begin = self._ends[index] - self.of[index].spec.shape[self.dim]
            stop = min(last, self._ends[index])
            if first < stop:
                yield self.of[index], first, first - begin, stop - begin
            first, index = max(first, stop), index + 1

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.of

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([part.tensor(find) for part in self.of], self.dim)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        first, last = offset[self.dim], offset[self.dim] + into.shape[self.dim]
        for part, at, start, stop in self.inside(first, last):
            inner = [*offset]
            inner[self.dim] = start
            part.read(source, inner, into.narrow(self.dim, at - first, stop - start))

    def text(self) -> str:
        shown = [part.text() for part in (self.of if len(self.of) < 4 else (self.of[0], self.of[1], self.of[-1]))]
        if len(self.of) > 3:
            shown.insert(2, f"... {len(self.of) - 3} more")
        return f"concatenate({', '.join(shown)}; {self.dim})"


@dataclass(frozen=True, slots=True)
class Converted(Unary):
    """Value that is converted to another dtype."""

    of: Value
    dtype: torch.dtype
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", TensorSpec(self.of.spec.shape, self.dtype))

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return self.of.tensor(find).to(self.dtype)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        if into.dtype == self.dtype:  # the source rounds once, to this dtype
            self.of.read(source, offset, into)
        else:  # round to this dtype first, then to the dtype of the target
            here = torch.empty(into.shape, dtype=self.dtype)
            self.of.read(source, offset, here)
            into.copy_(here)

    def text(self) -> str:
        return f"cast({self.of.text()}, {str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True, slots=True)
class Whole(Unary):
    """Full tensor of a value that is sharded over ranks; computing it is collective over the value's mesh."""

    of: Value

    @property
    def spec(self) -> TensorSpec:  # type: ignore[override]
        return self.of.spec

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return full(self.of.tensor(find))

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        self.of.read(source, offset, into)  # files hold full tensors, so nothing is gathered

    def text(self) -> str:
        return f"gather({self.of.text()})"


@dataclass(frozen=True, slots=True)
class Placed(Unary):
    """Value sharded over a mesh, without communication: each rank computes only its shard."""

    of: Value
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def spec(self) -> TensorSpec:  # type: ignore[override]
        return self.of.spec

    def tensor(self, find: Callable[[str], Tensor]) -> DTensor:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(self.of.tensor(find), self.mesh, self.placements, src_data_rank=None)

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        self.of.read(source, offset, into)

    def text(self) -> str:
        return f"distribute({self.of.text()}, {', '.join(map(str, self.placements))})"
