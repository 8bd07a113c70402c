"""Worlds: run a function on n processes that form a process group, in a fraction of a second.

The processes are forked from a server that has already imported torch, so that only the first world of a test run takes
3 to 4 seconds. They connect through a file, so no port is needed.
"""

from d9d_testing.world.errors import RankFailedError, RankHungError, WorldError
from d9d_testing.world.world import World

__all__ = ["RankFailedError", "RankHungError", "World", "WorldError"]
