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

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Ranks themselves: a group cannot be copied."""
        return self
