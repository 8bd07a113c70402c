"""Topology of a process: its coordinates, device, device meshes and process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from d9d_core.errors import BuildError
from d9d_core.grid import AXES, Grid
from d9d_core.plugin import ViewSpec
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from d9d_engine.distributed.devices import own_backend
from d9d_engine.supervision.watchdog import Watchdog

__all__ = ["Topology"]

#: Phases of a run with a time limit.
_PHASES = ("startup", "step", "checkpoint")


@dataclass(frozen=True)
class Topology:
    """Device meshes and process groups of this process, its coordinates on the mesh axes and its device.

    Groups are created when first used; all ranks build the same job and so create groups in the same order. Dimensions
    of several views with the same ranks share one group.

    Attributes:
        sizes: axis -> size, for the base axes and ``ep``.
        rank: number of this process.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        device: device of this process.
        node_rank: number of this machine.
        num_nodes: number of machines.
        views: name -> view of the mesh; see :class:`d9d_core.plugin.ViewSpec`.
        watchdog: enforces the time limits of phases.
        simulated: whether the other processes do not exist, because the job is only checked; the device may not exist
            either. See :func:`d9d_engine.distributed.simulate.simulated_world`.
    """

    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1) | {"ep": 1})
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    node_rank: int = 0
    num_nodes: int = 1
    views: Mapping[str, ViewSpec] = field(default_factory=dict)
    watchdog: Watchdog = field(default_factory=Watchdog, repr=False, compare=False)
    simulated: bool = False
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)
    _groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def is_main(self) -> bool:
        """Whether this process prints, calls trackers and writes shared files for all ranks."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether process groups exist; a job of one process needs none."""
        return self.world_size > 1 or dist.is_initialized()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks along the data-parallel axes, which see different samples."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process along the data-parallel axes."""
        coordinate = self.coordinate
        return coordinate["dp_replicate"] * self.sizes["dp_shard"] + coordinate["dp_shard"]

    @property
    def coordinate(self) -> dict[str, int]:
        """Coordinates of this process: base axis -> position along the axis."""
        return Grid({axis: self.sizes[axis] for axis in AXES}).coordinate(self.rank)

    def __str__(self) -> str:
        """Rank and coordinates: ``rank 3 (dp_replicate=1, dp_shard=1)``; axes of size one are left out."""
        return describe_rank(self.sizes, self.rank)

    def grid(self, view: str) -> Grid:
        """Sizes of a view's dimensions.

        Raises:
            BuildError: no plugin declares the view.
        """
        if view not in self.views:
            raise BuildError(f"no view '{view}' of the mesh is declared; there are: {', '.join(self.views) or 'none'}")
        return Grid.of_view(self.views[view], self.sizes)

    def mesh(self, view: str, *dims: str) -> DeviceMesh:
        """Device mesh of a view, or a submesh of some of its dimensions. Submeshes of one view have a common root mesh.

        Collective over all ranks at the first use of a view.

        Raises:
            BuildError: the view or dimension does not exist, or the process group is not initialised.
        """
        self._check_dims(view, dims)
        if view not in self._meshes:
            self._meshes[view] = self._make_mesh(self.grid(view))
        mesh = self._meshes[view]
        return mesh[dims] if dims else mesh

    def axes_group(self, *axes: str, purpose: str = "", blocks: int | None = None) -> dist.ProcessGroup | None:
        """Process group of the ranks that differ from this one along base axes only; ``None`` without process groups.

        Collective over all ranks at the first use.

        Args:
            axes: base axes.
            purpose: each purpose has a separate group, so that its messages do not wait for messages of other groups; a
                group with a purpose supports tensors of this process's device only.
            blocks: largest number of thread blocks of a collective's kernel, if the backend supports a limit.
        """
        if not self.is_distributed:
            return None
        ranks = Grid({axis: self.sizes[axis] for axis in AXES}).group(self.rank, axes)
        return self._group(ranks, purpose, own_backend(self.device, blocks) if purpose else {})

    def positions_group(self, axis: str, positions: Sequence[int]) -> dist.ProcessGroup | None:
        """Group of the ranks at ``positions`` along a base axis; on all other ranks, the group of these other ranks.

        ``None`` without process groups. Collective over all ranks at the first use.
        """
        if not self.is_distributed:
            return None
        line = Grid({name: self.sizes[name] for name in AXES}).group(self.rank, [axis])
        here = line.index(self.rank) in positions
        # torch names a group by the number of earlier groups, so every rank has to create one here.
        ranks = tuple(rank for position, rank in enumerate(line) if (position in positions) == here)
        return self._group(ranks, f"{axis} {list(positions)}")

    def group(self, view: str, *dims: str) -> dist.ProcessGroup | None:
        """Process group of the ranks that differ from this one along ``dims`` only; ``None`` without process groups.

        Collective over all ranks at the first use.

        Raises:
            BuildError: the view or dimension does not exist.
        """
        if not self.is_distributed:
            return None
        self._check_dims(view, dims)
        return self._group(self.grid(view).group(self.rank, dims))

    @property
    def world(self) -> dist.ProcessGroup | None:
        """Process group of all ranks, which supports CPU tensors too; ``None`` without process groups."""
        return dist.group.WORLD if self.is_distributed else None

    def barrier(self) -> None:
        """Wait for all processes, but not for their devices. Collective over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1), group=self.world)

    def set_timeout(self, phase: Literal["startup", "step", "checkpoint"], seconds: float) -> None:
        """Change one of the job's ``timeouts``, and the timeout of all process groups. Call it on all ranks.

        A run ends with a report once the limits of all ranks have passed without progress. Process groups get the
        longest of all limits plus a margin, as a rank in a phase with a short limit may wait for a rank in a phase with
        a long limit. No effect for a single process.

        Raises:
            BuildError: the phase does not exist, or the time is not above 0.
        """
        if phase not in _PHASES or not seconds > 0:
            raise BuildError(
                f"set_timeout({phase!r}, {seconds}): name one of the phases {', '.join(_PHASES)}, and a time above 0 s"
            )
        self.watchdog.set_limit(phase, seconds)

    @contextmanager
    def main_first(self, per_machine: bool = False) -> Iterator[None]:
        """Run the block on the main process (or the first process of each machine), then on all other processes.

        Collective over all ranks.
        """
        first = self.local_rank == 0 if per_machine else self.is_main
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()

    def _check_dims(self, view: str, dims: Sequence[str]) -> None:
        known = self.grid(view).sizes
        for dim in dims:
            if dim not in known:
                raise BuildError(
                    f"view '{view}' of the mesh has no dimension '{dim}', only {', '.join(known)}; for axes of the "
                    "mesh, "
                    "call axes_group()"
                )

    def _make_mesh(self, grid: Grid) -> DeviceMesh:
        if not dist.is_initialized():
            raise BuildError(
                f"{self} has no process group, which a mesh needs; start the job with d9d train or torchrun, build it "
                "inside Job.joined(), or call torch.distributed.init_process_group() first"
            )
        groups = [self._group(grid.group(self.rank, [name])) for name in grid.sizes]
        ranks = torch.arange(self.world_size).view(*grid.sizes.values())
        device = "cpu" if self.simulated else self.device.type
        return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(grid.sizes))

    def _group(
        self, ranks: tuple[int, ...], purpose: str = "", how: Mapping[str, Any] | None = None
    ) -> dist.ProcessGroup:
        if len(ranks) == self.world_size and not purpose:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if (ranks, purpose) not in self._groups:
            # Only members take part: each rank creates its own group of each partition, in the same order.
            group = dist.new_group(list(ranks), use_local_synchronization=True, **how or {})
            assert isinstance(group, dist.ProcessGroup)
            self._groups[ranks, purpose] = group
        return self._groups[ranks, purpose]


def place_along(topology: Topology, axes: Sequence[str]) -> tuple[int, int]:
    """Index of this rank among the ranks that differ from it along base axes only, and their number."""
    ranks = Grid({axis: topology.sizes[axis] for axis in AXES}).group(topology.rank, axes)
    return ranks.index(topology.rank), len(ranks)


def describe_rank(sizes: Mapping[str, int], rank: int) -> str:
    """Rank and coordinates: ``rank 3 (dp_replicate=1, dp_shard=1)``; axes of size one are left out."""
    coordinate = Grid({axis: sizes[axis] for axis in AXES}).coordinate(rank)
    shown = ", ".join(f"{axis}={at}" for axis, at in coordinate.items() if sizes[axis] > 1)
    return f"rank {rank} ({shown})" if shown else f"rank {rank}"
