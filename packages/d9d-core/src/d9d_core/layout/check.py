"""Check of a job's layout; one error reports all problems of mesh, strategies, schedule and batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from d9d_core.config import Location
from d9d_core.errors import D9dError
from d9d_core.job_file.job import MAX_MICROBATCHES, BaseJob, JobConfig, Mesh
from d9d_core.job_file.resolve import Parts
from d9d_core.plugin import ModelSpec, StrategySpec
from d9d_core.program.placement import plan_pipeline
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.registry import Registry

#: Largest number of legal values that a message lists.
_LISTED = 6


@dataclass(frozen=True)
class Problem:
    """Problem of a layout.

    Attributes:
        location: field of the job file.
        text: description of the problem, with legal values.
        error: error that the schedule raised; ``None`` for other problems.
    """

    location: Location
    text: str
    error: D9dError | None = None


def layout_problems(
    job: BaseJob, selection: Parts, registry: Registry, world_size: int, auto: str | None = None
) -> list[Problem]:
    """Problems of a job's layout on a number of processes; an empty list if its sizes fit.

    Args:
        job: job whose sections are valid one by one.
        selection: records of the job.
        registry: registry with strategies that a message may recommend.
        world_size: number of processes.
        auto: mesh axis whose size follows from the number of processes.
    """
    batch = list(_batch(job, world_size))
    return [
        *_world(job.mesh, world_size, auto),
        *_expert_groups(job.mesh),
        *_unused(job, selection, registry),
        *batch,
        *([] if batch else _schedule(job, selection)),
    ]


def unused_axes(mesh: Mesh, selection: Parts) -> list[str]:
    """Mesh axes with several ranks that no component of the job uses: all ranks along them would do the same work."""
    used = {
        axis for chosen, _ in selection.strategies if isinstance(chosen.spec, StrategySpec) for axis in chosen.spec.axes
    }
    used |= {token.removeprefix("mesh:") for chosen in selection.all() for token in chosen.spec.requires}
    used |= {"pp"} if selection.schedule else set()
    return [axis for axis, size in mesh.sizes().items() if size > 1 and axis not in used]


def idle_parts(job: JobConfig, selection: Parts) -> list[str]:
    """Warnings about fields without effect: strategies or a schedule on axes of size 1, or an impossible export."""
    sizes = job.mesh.sizes()
    parts = [
        (chosen, chosen.spec.axes) for chosen, _ in selection.strategies if isinstance(chosen.spec, StrategySpec)
    ] + ([(selection.schedule, frozenset({"pp"}))] if selection.schedule else [])
    return _idle_export(job, selection.model) + [
        f"{chosen.where}: {chosen.entry.kind.name} '{chosen.spec.name}' has no effect, because "
        f"{' and '.join(f'mesh.{axis}' for axis in sorted(axes))} {'is' if len(axes) == 1 else 'are'} 1; "
        f"give {'it' if len(axes) == 1 else 'one'} more ranks, or remove {chosen.where}"
        for chosen, axes in parts
        if axes and all(sizes.get(axis, 1) == 1 for axis in axes)
    ]


def _idle_export(job: JobConfig, model: Chosen) -> list[str]:
    if not job.export or not isinstance(model.spec, ModelSpec) or model.spec.hugging_face is not None:
        return []
    text = "has no Hugging Face layout, so the end of the run exports no model; checkpoints have the weights"
    return [f"export: model {model.entry} {text}"]


def strategies_for(axis: str, registry: Registry) -> list[StrategySpec]:
    """Strategies that use a mesh axis and do not alter training results, sorted by the number of axes that they use."""
    specs = [entry.spec for entry in registry.entries("strategy")]
    found = [
        spec for spec in specs if isinstance(spec, StrategySpec) and axis in spec.axes and not spec.alters_training
    ]
    return sorted(found, key=lambda spec: (len(spec.axes), spec.key))


def covers(ep: int, mesh: Mesh) -> bool:
    """Whether ``ep`` ranks fill whole axes from ``tp`` outwards, and then a divisor of the next axis's size."""
    for size in (mesh.tp, mesh.cp, mesh.dp_shard, mesh.dp_replicate):
        if size % ep == 0:
            return True
        if ep % size:
            return False
        ep //= size
    return False


def near_multiples(number: int, step: int) -> list[int]:
    """Multiples of ``step`` nearest below and above ``number``, without zero."""
    below = number // step * step
    return [multiple for multiple in (below, below + step) if multiple]


def _world(mesh: Mesh, world_size: int, auto: str | None) -> Iterator[Problem]:
    needed = mesh.world_size
    if needed == world_size:
        return
    ranks = f"{needed} rank{'s' if needed != 1 else ''}"
    if auto is not None:
        others = needed // mesh.sizes()[auto]
        start = _either(near_multiples(world_size, others))
        yield Problem(
            ("mesh", auto),
            f"mesh.{auto} is auto, but {world_size} processes are not a multiple of {others}, the product of the other "
            f"axes; start {start} processes, or change another axis",
        )
        return
    start = f"{needed} process{'es' if needed != 1 else ''}"
    how = f" (d9d train --nproc {needed}, torchrun, or srun)" if needed > 1 else ""
    text = f"mesh: {mesh} = {ranks}, but the job was started with {world_size}; change mesh or start {start}{how}"
    yield Problem(("mesh",), text)


def _expert_groups(mesh: Mesh) -> Iterator[Problem]:
    if covers(mesh.ep, mesh):
        return
    inner = {axis: mesh.sizes()[axis] for axis in ("tp", "cp", "dp_shard", "dp_replicate")}
    size = math.prod(inner.values())
    legal = [count for count in _divisors(size) if covers(count, mesh)]
    axes = ", ".join(f"{axis}={size}" for axis, size in inner.items())
    yield Problem(
        ("mesh", "ep"),
        f"mesh.ep: {mesh.ep} ranks that split the experts must cover whole inner axes and divide the next one; here "
        f"{axes}: use {_either(_nearest(legal, mesh.ep))}",
    )


def _unused(job: BaseJob, selection: Parts, registry: Registry) -> Iterator[Problem]:
    for axis in unused_axes(job.mesh, selection):
        names = [spec.key for spec in strategies_for(axis, registry)]
        which = f" ({_either(names)})" if names else ""
        what = "a schedule to 'pipeline'" if axis == "pp" else f"a strategy for it{which} to 'parallel'"
        size = job.mesh.sizes()[axis]
        text = f"mesh.{axis} is {size}, but no component of the job uses that axis; add {what}, or set it to 1"
        yield Problem(("mesh", axis), text)


def _batch(job: BaseJob, world_size: int) -> Iterator[Problem]:
    ranks, size, micro = job.mesh.data_parallel_size, job.batch.size, job.batch.microbatch
    step = ranks * (micro or 1)
    if size % ranks and world_size > 1 and math.gcd(size, world_size) == 1:
        sizes = _either(near_multiples(size, step))
        fitting = _either([count for count in _divisors(size) if count <= 8 * world_size])
        yield Problem(
            ("batch", "size"),
            f"batch.size {size} fits no data-parallel layout of {world_size} processes, which share no divisor with "
            f"it; use {sizes}, or start {fitting} process{'es' if fitting != '1' else ''}",
        )
    elif size % ranks:
        sizes = _either(near_multiples(size, step))
        text = f"batch.size {size} cannot be split over {ranks} data-parallel ranks; use {sizes}"
        yield Problem(("batch", "size"), text)
    elif micro is not None and (size // ranks) % micro:
        share = size // ranks
        yield Problem(
            ("batch", "microbatch"),
            f"batch.size {size} on {ranks} data-parallel rank(s) is {share} samples each, not a multiple of "
            f"batch.microbatch {micro}; use batch.microbatch {largest_divisor(share, micro)}, "
            f"or batch.size {_either(near_multiples(size, step))}",
        )
    elif job.microbatches > MAX_MICROBATCHES:
        yield Problem(
            ("batch", "microbatch"),
            f"batch.size {size} makes {job.microbatches:,} microbatches per step on each rank, but at most "
            f"{MAX_MICROBATCHES:,} can be scheduled; make batch.microbatch larger",
        )


def _schedule(job: BaseJob, selection: Parts) -> Iterator[Problem]:
    if selection.schedule is None:
        return  # pipeline ranks without a schedule are reported as an unused axis
    try:
        plan_pipeline(job, selection)
    except D9dError as error:
        yield Problem(("pipeline",), str(error), error)


def largest_divisor(number: int, most: int) -> int:
    """Largest divisor of ``number`` that is at most ``most``, such as the largest possible microbatch."""
    return max(count for count in _divisors(number) if count <= most)


def _divisors(number: int) -> list[int]:
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})


def _nearest(legal: list[int], wanted: int) -> list[int]:
    return sorted(sorted(legal, key=lambda value: abs(value - wanted))[:_LISTED])


def _either(values: Iterable[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
