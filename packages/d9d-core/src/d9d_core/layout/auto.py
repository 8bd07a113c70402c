"""Settlement of ``auto`` in a job file's mesh, and of the mesh that a job file leaves out. Imports no torch.

Both depend on the number of processes alone, so the document is rewritten before it is validated: everything that sees
the job sees plain numbers, and so does who reads the job that a run has saved.
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
    """Source of a job: for messages only, so jobs are equal whatever theirs are.

    Attributes:
        document: what was read, with ``auto`` settled.
        auto: the mesh axis that took what was left of the processes.
        note: what was added to the file's layout, for the user.
    """

    document: Document = field(default_factory=lambda: Document({}, ""), compare=False)
    auto: str | None = field(default=None, compare=False)
    note: str | None = field(default=None, compare=False)


def settle(document: Document, registry: Registry, world_size: int | None) -> Source:
    """Settle the mesh of a job file for a number of processes.

    What is malformed, ``auto`` on two axes too, is left as it is: validation reports it with all other problems.

    Args:
        document: the job file.
        registry: meaning of its strategies' names.
        world_size: number of processes; ``None`` if nobody has said, which is one for ``auto``.
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
    """Processes that the other axes leave; where these do not divide them, the layout's check says so."""
    sizes = [mesh.get(other, 1) for other in AXES if other != axis]
    # The sizes that are no such numbers are errors of their own.
    others = math.prod(size for size in sizes if type(size) is int and size > 0)
    return max(1, world_size // others)


def _default(document: Document, registry: Registry, world_size: int) -> Source:
    """Layout of a job without a mesh: all processes along the axis that its strategies use, else ``fsdp``."""
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
