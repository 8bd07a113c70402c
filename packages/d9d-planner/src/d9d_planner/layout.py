"""Layouts of a job: mesh, strategies, schedule and microbatch. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from d9d_core.config import PluginConfig
from d9d_core.grid import AXES, Grid
from d9d_core.job_file.job import BaseJob, Mesh
from d9d_core.plugin import ViewSpec

from d9d_planner.network import Group

AnyJob = TypeVar("AnyJob", bound=BaseJob)


@dataclass(frozen=True)
class Layout:
    """Layout of a job: mesh, strategies, schedule and microbatch.

    Attributes:
        mesh: sizes of the axes.
        parallel: configs of the strategies.
        pipeline: config of the schedule; ``None`` without one.
        size: number of samples in a step.
        microbatch: number of samples in a forward on one rank.
    """

    mesh: Mesh
    parallel: tuple[PluginConfig, ...]
    pipeline: PluginConfig | None
    size: int
    microbatch: int

    @classmethod
    def of(cls, job: BaseJob) -> Layout:
        return cls(job.mesh, tuple(job.parallel), job.pipeline, job.batch.size, job.microbatch_size)

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step on one rank."""
        return self.size // self.mesh.data_parallel_size // self.microbatch

    def on(self, job: AnyJob) -> AnyJob:
        """Copy of a job with this layout."""
        batch = job.batch.model_copy(update={"size": self.size, "microbatch": self.microbatch})
        changed: dict[str, Any] = {
            "mesh": self.mesh,
            "parallel": list(self.parallel),
            "pipeline": self.pipeline,
            "batch": batch,
        }
        return job.model_copy(update=changed)

    def __str__(self) -> str:
        axes = [f"{axis}={size}" for axis, size in self.mesh.sizes().items() if size > 1]
        names = [_described(config) for config in self.parallel if config.selector != "compile"]
        schedule = [] if self.pipeline is None else [self.pipeline.selector]
        return f"{' '.join(axes) or 'one device'}, {' '.join([*names, *schedule]) or 'no strategy'}"


def _described(config: PluginConfig) -> str:
    """Name of a strategy with its non-default settings: ``fsdp(defer=everything)``."""
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{config.selector}({shown})" if shown else config.selector


def axis_group(mesh: Mesh, axis: str) -> Group:
    """Size and stride of a group of ranks along a base axis or ``ep``."""
    sizes = mesh.sizes()
    inner = AXES[AXES.index(axis) + 1 :] if axis in AXES else ()
    return Group(sizes[axis], math.prod(sizes[name] for name in inner))


def view_group(mesh: Mesh, view: ViewSpec, dim: str) -> Group:
    """Size and stride of a group of ranks along a dimension of a view."""
    grid = Grid.of_view(view, mesh.sizes())
    names = list(grid.sizes)
    return Group(grid.sizes[dim], math.prod(grid.sizes[name] for name in names[names.index(dim) + 1 :]))


@dataclass(frozen=True, slots=True)
class DataGroups:
    """Groups of ranks over which parameters are sharded and gradients reduced.

    Attributes:
        shards, replicas: groups for parameters that all tokens use.
        expert_shards, expert_replicas: groups for experts.
    """

    shards: Group
    replicas: Group
    expert_shards: Group
    expert_replicas: Group

    @classmethod
    def of(cls, mesh: Mesh, views: Mapping[str, ViewSpec]) -> DataGroups:
        dense, expert = views["dense"], views["expert"]
        shards, replicas = (view_group(mesh, dense, dim) for dim in ("fsdp", "dp_replicate"))
        if mesh.ep == 1:  # then experts are sharded like all other parameters
            return cls(shards, replicas, shards, replicas)
        spread = (view_group(mesh, expert, dim) for dim in ("expert_fsdp", "expert_replicate"))
        return cls(shards, replicas, *spread)
