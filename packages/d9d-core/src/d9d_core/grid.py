"""Arithmetic of the process grid: coordinates, views and groups of ranks. Imports no torch.

Ranks are numbered in row-major order over the base axes, outermost first. A view arranges the same rank numbers in
other dimensions, so the process group of a rank along any dimension of any view can be computed from sizes alone,
without starting processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from d9d_core.errors import BuildError, JobError
from d9d_core.plugin import ViewSpec

__all__ = ["AXES", "Grid"]

#: Axes whose sizes multiply to the world size, outermost first. ``ep`` is left out: it reuses ranks of other axes.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Grid:
    """Grid of ranks: named dimensions whose product is the number of ranks.

    Attributes:
        sizes: dimension -> size, outermost first.
    """

    sizes: Mapping[str, int]

    @classmethod
    def of_view(cls, view: ViewSpec, axes: Mapping[str, int]) -> Grid:
        """Grid of a view over a mesh with these axis sizes.

        Raises:
            JobError: the size of a view's dimension does not fit the axes it covers, or the view does not cover all
                ranks exactly once.
        """
        sizes: dict[str, int] = {}
        rest = {axis: axes[axis] for dim in view.dims for axis in dim.over}
        for dim in reversed(view.dims):
            size = math.prod(axes[axis] for axis in dim.axes)
            for axis in dim.over:
                covered = min(size, rest[axis])
                if size % covered or rest[axis] % covered:
                    inner_axes = " x ".join(f"{inner}={axes[inner]}" for inner in dim.axes)
                    text = (
                        f"mesh: view '{view.name}' cannot lay {axis}={axes[axis]} over {inner_axes}; change one of them"
                    )
                    raise JobError(text)
                size, rest[axis] = size // covered, rest[axis] // covered
            sizes[dim.name] = size
        sizes = {dim.name: sizes[dim.name] for dim in view.dims}
        grid, world = cls(sizes), math.prod(axes[axis] for axis in AXES)
        if grid.size != world:
            raise JobError(
                f"mesh: the view '{view.name}' has {grid} = {grid.size} ranks, but the mesh has {world}; "
                "a view must cover each rank once: change its dimensions, or the mesh"
            )
        return grid

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank: dimension -> position along it."""
        found = {}
        for name, size in reversed(list(self.sizes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Rank at a coordinate: the inverse of :meth:`coordinate`."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + coordinate[name]
        return rank

    def group(self, rank: int, dims: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` along ``dims`` only, ``rank`` included, in ascending order.

        Raises:
            BuildError: the grid lacks one of the dimensions.
        """
        chosen, own = set(dims), self.coordinate(rank)
        if unknown := sorted(chosen - self.sizes.keys()):
            names = ", ".join(map(repr, unknown))
            raise BuildError(f"this view of the mesh has no dimension {names}; use one of {', '.join(self.sizes)}")
        ranks = [0]
        for name, size in self.sizes.items():
            positions = range(size) if name in chosen else (own[name],)
            ranks = [base * size + position for base in ranks for position in positions]
        return tuple(ranks)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1) or "one process"
