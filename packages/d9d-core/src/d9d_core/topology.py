"""Protocol of a process's topology, for strategies, tasks and handlers of schedules.

:class:`d9d_engine.distributed.mesh.Topology` implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from d9d_core.grid import Grid

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Topology"]


class Topology(Protocol):
    """Protocol of the topology: mesh axes, this process's coordinates and device, its device meshes and groups.

    A process group is created on first use, so all ranks must request the same groups in the same order.
    """

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis -> size: the base axes and ``ep``."""
        ...

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        ...

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        ...

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        ...

    @property
    def coordinate(self) -> Mapping[str, int]:
        """Base axis -> index of this process along the axis."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether the other processes do not exist, because the job is only checked."""
        ...

    def grid(self, view: str) -> Grid:
        """Grid of a view, which arranges the ranks of the mesh along other dimensions.

        Raises:
            BuildError: no plugin declares the view.
        """
        ...

    def mesh(self, view: str, *dims: str) -> DeviceMesh:
        """Device mesh of a view, or of some of its dimensions. Collective over all ranks on a view's first use.

        Raises:
            BuildError: there is no such view or dimension, or the process group is not initialised.
        """
        ...

    def group(self, view: str, *dims: str) -> dist.ProcessGroup | None:
        """Process group along some dimensions of a view; ``None`` without process groups. Collective on first use.

        Raises:
            BuildError: there is no such view or dimension.
        """
        ...

    def axes_group(self, *axes: str, purpose: str = "", blocks: int | None = None) -> dist.ProcessGroup | None:
        """Process group along base axes; ``None`` without process groups. Collective on first use.

        Args:
            axes: base axes.
            purpose: name of a separate group, so that its collectives do not wait for collectives of other groups.
            blocks: most thread blocks for the group's kernels, on devices that support this limit.
        """
        ...

    def positions_group(self, axis: str, positions: Sequence[int]) -> dist.ProcessGroup | None:
        """Group of the ranks at ``positions`` along a base axis; on all other ranks, the group of these other ranks."""
        ...
