"""Log lines of ranks, with the standard library's ``logging``: loggers below ``d9d`` and their handler.

Importing this module configures nothing. A process that joins a job (:meth:`d9d_engine.job.Job.joined`, every command)
prints the lines on standard error, unless the surrounding program has configured logging.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from d9d_core.topology import Topology

from d9d_engine.distributed.mesh import describe_rank

__all__ = ["rank_logger"]

#: Parent of the loggers of the engine and of all plugins.
NAME = "d9d"


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger whose lines begin with the rank and its coordinate: ``rank 3 (dp_shard=1): ...``.

    Args:
        logger: logger that receives the lines.
        who: text that names the rank.
    """

    def __init__(self, logger: logging.Logger, who: str) -> None:
        super().__init__(logger, {})
        self._who = who

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix a line with the rank."""
        # The message may have % arguments, which the logger inserts.
        return f"{self._who}: {msg}", kwargs


def rank_logger(name: str, topology: Topology) -> RankLogger:
    """Logger ``d9d.<name>`` of this rank, for plugins; the job's ``logging.level`` sets the lowest printed level.

    ::

        log = rank_logger("my_strategy", topology)
        log.info("sharded %d tensors", count)  # INFO d9d.my_strategy: rank 3 (dp_shard=1): sharded 12 tensors

    Args:
        name: name of the plugin.
        topology: rank, device, meshes and process groups of this process.
    """
    return RankLogger(logging.getLogger(f"{NAME}.{name}"), describe_rank(topology.sizes, topology.rank))


@contextmanager
def log_lines(level: str | None, is_main: bool) -> Iterator[None]:
    """Print the lines of all loggers below ``d9d`` on standard error inside the block.

    If the program has handlers, only the level is set.

    Args:
        level: lowest level to print; by default ``info`` on the main rank and ``warning`` on other ranks.
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
