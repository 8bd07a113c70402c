"""Resolution of ``auto`` in a job file's mesh, and of the mesh that a job file leaves out. Imports no torch.

Both depend on the number of processes alone, so the document is rewritten before validation: all code that sees the
job, and every reader of the job that a run saves, finds plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from d9d_core.errors import PluginError
from d9d_core.grid import AXES
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import DATA_AXES
from d9d_core.plugin import StrategySpec
from d9d_core.registry.registry import Registry

#: Strategy that a job without a mesh gets on several processes; d9d-parallel declares it.
DEFAULT_STRATEGY = "fsdp"
_AUTO = "auto"


@dataclass(frozen=True)
class Source:
    """Source of a job, for messages only: jobs from different sources compare equal.

    Attributes:
        document: document as read, with ``auto`` replaced by a number, and an absent mesh by a default one.
        auto: mesh axis whose size follows from the number of processes; ``None`` if there is none.
        note: message about the mesh that was added to the job; ``None`` if none was added.
    """

    document: Document = field(default_factory=lambda: Document({}, ""), compare=False)
    auto: str | None = field(default=None, compare=False)
    note: str | None = field(default=None, compare=False)


def settle(document: Document, registry: Registry, world_size: int | None) -> Source:
    """Complete the mesh of a job file for a number of processes.

    Malformed values, also ``auto`` on two axes, are left for validation to report.

    Args:
        document: document of the job file.
        registry: registry that resolves the names of strategies.
        world_size: number of processes; ``None`` if unknown, which ``auto`` treats as one.
    """
    values = document.values
    mesh = values.get("mesh")
    if "mesh" not in values and (world_size or 1) > 1:
        return _default(document, registry, world_size or 1)
    if not isinstance(mesh, Mapping):
        return Source(document)
    autos = [axis for axis, size in mesh.items() if size == _AUTO]
    if len(autos) != 1 or autos[0] not in DATA_AXES:
        return Source(document)
    left = _left(mesh, autos[0], world_size or 1)
    return Source(_with(document, mesh={**mesh, autos[0]: left}), auto=autos[0])


def _left(mesh: Mapping[str, Any], axis: str, world_size: int) -> int:
    """Size of the ``auto`` axis: processes divided by the other axes, rounded down; later checks report a remainder."""
    sizes = [mesh.get(other, 1) for other in AXES if other != axis]
    # Invalid sizes are reported by validation.
    others = math.prod(size for size in sizes if type(size) is int and size > 0)
    return max(1, world_size // others)


def _default(document: Document, registry: Registry, world_size: int) -> Source:
    """Add a mesh to a job that has none: all processes lie along the data-parallel axis that its strategies use.

    If they use none, the processes lie along ``dp_shard``, and the strategy ``fsdp`` is added.
    """
    parallel = document.values.get("parallel", [])
    if not isinstance(parallel, list):
        return Source(document)
    used = _used_axes(parallel, registry)
    axis = next((axis for axis in ("dp_shard", "dp_replicate") if axis in used), None)
    of = f"mesh: {document.source} has no mesh"
    if axis is not None:
        settled = _with(document, mesh={axis: world_size})
        return Source(settled, axis, f"{of}: {axis} is {world_size}, for {world_size} processes")
    settled = _with(document, mesh={"dp_shard": world_size}, parallel=[*parallel, DEFAULT_STRATEGY])
    text = f"{of}: dp_shard is {world_size}, with the strategy {DEFAULT_STRATEGY}, for {world_size} processes"
    return Source(settled, "dp_shard", text)


def _used_axes(parallel: Collection[Any], registry: Registry) -> set[str]:
    used: set[str] = set()
    for entry in parallel:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        try:
            spec = registry.find("strategy", str(name)).spec
        except PluginError:
            continue  # reported by validation
        used |= set(spec.axes) if isinstance(spec, StrategySpec) else set()
    return used


def _with(document: Document, **sections: Any) -> Document:
    return replace(document, values={**document.values, **sections})
