"""Ranks of a process group, for use in modules."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist


class Ranks:
    """Ranks of a process group, for use in modules: unlike a group, they can be deep-copied with a module.

    Args:
        group: process group that contains this process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.name: str = group.group_name

    @property
    def numbers(self) -> tuple[int, ...]:
        """Global ranks, in the order of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return the same object, because a process group cannot be copied."""
        return self
