"""Ranks along a mesh axis, as modules hold them."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist


class Ranks:
    """Ranks of a group as modules hold them: copies of a module talk to the same ranks, which a group cannot say.

    Args:
        group: of this process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.name: str = group.group_name

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the ranks among all processes, in the order of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Ranks themselves: a group cannot be copied."""
        return self
