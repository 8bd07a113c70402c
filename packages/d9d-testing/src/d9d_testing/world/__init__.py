"""A function run on n processes that form one process group, in a fraction of a second.

The processes are forked from a server that has torch imported already; only the first world of a test run pays for that
(3 to 4 seconds). They meet through a file, so no port is taken.
"""

from d9d_testing.world.errors import RankFailedError, RankHungError, WorldError
from d9d_testing.world.world import World

__all__ = ["RankFailedError", "RankHungError", "World", "WorldError"]
