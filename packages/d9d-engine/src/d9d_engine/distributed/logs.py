"""Log lines of ranks, by the standard library's ``logging``: loggers below ``d9d``, and where their lines go.

Importing this configures nothing. A process that joins a job (:meth:`d9d_engine.job.Job.joined`, every command) prints
the lines on standard error, unless the program that it is part of has configured logging itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from d9d_core.topology import Topology

from d9d_engine.distributed.mesh import describe_rank

__all__ = ["rank_logger"]

#: Logger above those of the engine and of all plugins.
NAME = "d9d"


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger whose lines begin with the rank and its coordinate: ``rank 3 (dp_shard=1): ...``.

    Args:
        logger: that takes the lines.
        who: the rank.
    """

    def __init__(self, logger: logging.Logger, who: str) -> None:
        super().__init__(logger, {})
        self._who = who

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of a line."""
        # The line may have arguments of its own, which the logger inserts.
        return f"{self._who}: {msg}", kwargs


def rank_logger(name: str, topology: Topology) -> RankLogger:
    """Logger ``d9d.<name>`` of this rank, for code of plugins; ``logging.level`` of the job says what is printed.

    ::

        log = rank_logger("my_strategy", topology)
        log.info("sharded %d tensors", count)  # INFO d9d.my_strategy: rank 3 (dp_shard=1): sharded 12 tensors

    Args:
        name: of the plugin.
        topology: this process among others.
    """
    return RankLogger(logging.getLogger(f"{NAME}.{name}"), describe_rank(topology.sizes, topology.rank))


@contextmanager
def log_lines(level: str | None, is_main: bool) -> Iterator[None]:
    """Print the lines of ``d9d`` and all loggers below on standard error inside the block.

    Where the program has handlers already, only the level is set.

    Args:
        level: least level; by default ``info`` on the main rank and ``warning`` on others.
        is_main: whether this is the main rank.
    """
    logger = logging.getLogger(NAME)
    before = logger.level
    handler = None if logger.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel((level or ("info" if is_main else "warning")).upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            logger.removeHandler(handler)
