"""Names for conformance suites and tests: measured runs of layouts, checkpoints, simulated worlds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_engine.checkpoint.store import CheckpointStore
    from d9d_engine.compose.initialise import initialise
    from d9d_engine.distributed.devices import load_kernels_eagerly, share_hardware_queues
    from d9d_engine.distributed.packed_reduction import PackedReduction
    from d9d_engine.distributed.simulate import simulated_world
    from d9d_engine.step.metrics import Statistics
    from d9d_engine.trackers.hub import TrackerHub

#: Module of the names that need torch; they are imported when they are used.
_LAZY = {
    "initialise": "d9d_engine.compose.initialise",
    "CheckpointStore": "d9d_engine.checkpoint.store",
    "PackedReduction": "d9d_engine.distributed.packed_reduction",
    "Statistics": "d9d_engine.step.metrics",
    "TrackerHub": "d9d_engine.trackers.hub",
    "load_kernels_eagerly": "d9d_engine.distributed.devices",
    "share_hardware_queues": "d9d_engine.distributed.devices",
    "simulated_world": "d9d_engine.distributed.simulate",
}

__all__ = [
    "CheckpointStore",
    "PackedReduction",
    "Statistics",
    "TrackerHub",
    "initialise",
    "load_kernels_eagerly",
    "share_hardware_queues",
    "simulated_world",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
