"""Finds the nearest layout that fits the processes, verifies it, and formats it as an edit of the job file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from d9d_core.config import PluginConfig, speakable
from d9d_core.errors import D9dError
from d9d_core.job_file.job import MAX_MICROBATCHES, BaseJob, Batch, Mesh
from d9d_core.job_file.lookup import load_config
from d9d_core.job_file.reading import write_yaml
from d9d_core.job_file.resolve import Parts, select_parts
from d9d_core.layout.check import covers, largest_divisor, layout_problems, near_multiples, strategies_for, unused_axes
from d9d_core.program.placement import plan_pipeline
from d9d_core.registry.capabilities import Circumstances, judge
from d9d_core.registry.registry import Registry

#: Largest number of smaller microbatch sizes to try for a schedule; then ``4 * _TRIES`` larger batches are tried.
_TRIES = 16
_SECTIONS = ("mesh", "parallel", "pipeline", "batch")


def mended(job: BaseJob, registry: Registry, world_size: int) -> BaseJob | None:
    """Job with the nearest layout that fits ``world_size`` processes; ``None`` if none was found.

    An axis that no component uses gets a strategy or a schedule if one is installed, else its size becomes 1. The
    data-parallel axes absorb a surplus or lack of processes. If the data-parallel ranks divide the batch size, smaller
    microbatches are tried before larger batches.

    Args:
        job: job with a layout that does not fit.
        registry: registry with strategies and schedules that may be added.
        world_size: number of processes.
    """
    try:
        fitting = _with_batch(_with_used_axes(_with_ranks(job, registry, world_size), registry), registry)
        selection = select_parts(fitting, registry)
        if layout_problems(fitting, selection, registry, world_size) or not _capable(fitting, selection, registry):
            return None
    except (D9dError, ValidationError, _NoneFitsError):
        return None
    return fitting


def edit(before: BaseJob, after: BaseJob) -> str:
    """Lines of a job file for the differences between two layouts, with ``auto`` for the data-parallel axis.

    Args:
        before: original job.
        after: result of :func:`mended`.
    """
    lines = []
    for section in _SECTIONS:
        old, new = getattr(before, section), getattr(after, section)
        if old != new:
            text = write_yaml(written(new), default_flow_style=True, width=10_000)
            lines.append(f"{section}: {text.splitlines()[0]}")  # YAML of a scalar has a second line, "..."
    return "\n".join(lines)


class _NoneFitsError(Exception):
    """No layout near the job's own layout fits the number of processes."""


def _with_ranks(job: BaseJob, registry: Registry, world_size: int) -> BaseJob:
    sizes = job.mesh.sizes()
    selection = select_parts(job, registry)
    for axis in unused_axes(job.mesh, selection):
        if not any(_addable(job, axis, registry)):
            sizes[axis] = 1
    model_ranks = sizes["pp"] * sizes["cp"] * sizes["tp"]
    if world_size % model_ranks:
        raise _NoneFitsError
    left = world_size // model_ranks
    if sizes["dp_replicate"] * sizes["dp_shard"] != left:
        only_replicas = sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1
        sizes |= {"dp_replicate": left} if only_replicas else _shards(sizes["dp_replicate"], left)
    mesh = Mesh(**sizes)
    legal = [count for count in range(1, sizes["ep"] + 1) if covers(count, mesh)]
    return job.model_copy(update={"mesh": mesh.model_copy(update={"ep": legal[-1]})})


def _shards(replicas: int, left: int) -> dict[str, int]:
    return {"dp_shard": left // replicas} if left % replicas == 0 else {"dp_replicate": 1, "dp_shard": left}


def _with_used_axes(job: BaseJob, registry: Registry) -> BaseJob:
    """Job with an added strategy or schedule for each mesh axis that no component uses."""
    for axis in unused_axes(job.mesh, select_parts(job, registry)):
        added = next(_addable(job, axis, registry), None)
        if added is None:
            raise _NoneFitsError
        section: dict[str, Any] = {"pipeline": added} if axis == "pp" else {"parallel": [*job.parallel, added]}
        job = job.model_copy(update=section)
    return job


def _addable(job: BaseJob, axis: str, registry: Registry) -> Iterator[PluginConfig]:
    """Configs of installed strategies or schedules that use an axis and fit the other components of the job."""
    if axis == "pp":
        entries = registry.entries("schedule")
    else:
        names = [spec.key for spec in strategies_for(axis, registry)]
        entries = [entry for name in names for entry in registry.entries("strategy") if entry.spec.key == name]
    for entry in entries:
        try:
            config = load_config(entry)(name=entry.spec.key)
        except (D9dError, ValidationError):
            continue
        update: dict[str, Any] = {"pipeline": config} if axis == "pp" else {"parallel": [*job.parallel, config]}
        grown = job.model_copy(update=update)
        if _capable(grown, select_parts(grown, registry), registry):
            yield config


def _capable(job: BaseJob, selection: Parts, registry: Registry) -> bool:
    verdicts = judge(selection.all(), registry, Circumstances(job.mesh.sizes()))
    return all(verdict.satisfied is not False for verdict in verdicts)


def _with_batch(job: BaseJob, registry: Registry) -> BaseJob:
    """Job with the nearest batch sizes that fit its data-parallel ranks and its pipeline schedule."""
    ranks, batch = job.mesh.data_parallel_size, job.batch
    if batch.size % ranks:
        legal = near_multiples(batch.size, ranks * (batch.microbatch or 1))
        batch = _divided(batch, size=min(legal, key=lambda size: abs(size - batch.size)))
    share = batch.size // ranks
    if batch.microbatch is not None and share % batch.microbatch:
        batch = _divided(batch, microbatch=largest_divisor(share, batch.microbatch))
    if share // (batch.microbatch or share) > MAX_MICROBATCHES:
        least = -(-share // MAX_MICROBATCHES)
        batch = _divided(batch, microbatch=next(size for size in range(least, share + 1) if share % size == 0))
    selection = select_parts(job, registry)
    for candidate in _scheduled(batch, ranks) if selection.schedule else [batch]:
        fitting = job.model_copy(update={"batch": candidate})
        try:
            plan_pipeline(fitting, selection)
        except D9dError:
            continue
        return fitting
    raise _NoneFitsError


def _scheduled(batch: Batch, ranks: int) -> Iterator[Batch]:
    """Batches to try: ``batch``, then the same samples in smaller microbatches, then more samples."""
    yield batch
    share = batch.size // ranks
    own = batch.microbatch or share
    smaller = [size for size in range(own - 1, 0, -1) if share % size == 0]
    for size in smaller[:_TRIES]:
        yield _divided(batch, microbatch=size)
    for count in range(share // own + 1, share // own + 1 + 4 * _TRIES):
        yield _divided(batch, size=ranks * own * count, microbatch=own)


def _divided(batch: Batch, **sizes: int) -> Batch:
    """Copy of a batch section with the given sizes replaced."""
    return Batch.model_validate({**batch.model_dump(), **sizes})


def written(value: Any) -> Any:
    """Value as written in a job file: without defaults; a component with default settings becomes its bare name."""
    if isinstance(value, Mesh):
        sizes: dict[str, Any] = {axis: size for axis, size in value.sizes().items() if size > 1}
        axis = "dp_shard" if "dp_shard" in sizes else "dp_replicate"
        return sizes | ({axis: "auto"} if axis in sizes else {})
    if isinstance(value, list):
        return [written(item) for item in value]
    if isinstance(value, PluginConfig):
        fields = speakable(value.model_dump(mode="json", exclude_defaults=True)) | {"name": value.selector}
        return value.selector if len(fields) == 1 else fields
    if isinstance(value, Batch):
        sizes = value.model_dump(exclude={"prefetch"}, exclude_none=True)
        return sizes | value.model_dump(include={"prefetch"}, exclude_defaults=True)
    return value
