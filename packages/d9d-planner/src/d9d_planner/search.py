"""Search over all valid layouts of a job: meshes, strategies, schedules, microbatches. Imports no torch."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from d9d_core.errors import D9dError
from d9d_core.job_file.job import MAX_MICROBATCHES, Mesh

from d9d_planner.device import Device
from d9d_planner.layout import Layout
from d9d_planner.options import Options, divisors
from d9d_planner.prediction import Prediction
from d9d_planner.workload import Workload

#: Largest numbers that are tried: pipeline ranks, context-parallel ranks, and samples per microbatch.
_MOST_STAGES, _MOST_CONTEXT, _MOST_MICROBATCH = 32, 64, 16
#: The search ends when no further layout can be among the 20 fastest (first number), or when 400 layouts fit (second).
_CERTAIN, _EXAMINED = 20, 400
#: Largest microbatch of memory-saving layouts.
_SMALL = 2


@dataclass(frozen=True)
class Found:
    """Result of a search for layouts.

    Attributes:
        ranked: layouts that fit, the fastest first.
        legal: number of layouts that the model supports, not counting schedules.
        smallest: layout that needs the least memory, even if it does not fit; ``None`` if no layout is valid.
    """

    ranked: Sequence[Prediction]
    legal: int
    smallest: Prediction | None

    @property
    def pareto(self) -> list[Prediction]:
        """Pareto front: layouts such that no other layout is both faster and needs less memory."""
        front: list[Prediction] = []
        for prediction in self.ranked:
            if not front or prediction.memory.needed < front[-1].memory.needed:
                front.append(prediction)
        return front


def search(workload: Workload, devices: int, device: Device) -> Found:
    """Search the layouts of a job on a number of devices.

    Layouts are tried in order of a lower bound of their time. Once this bound exceeds the time of enough layouts that
    fit, no later layout can be among the fastest. Memory-saving layouts are tried in addition.

    Args:
        workload: workload of the job.
        devices: number of devices.
        device: rates of a device.
    """
    bases = _by_least_time(workload, devices, device)
    fitting: list[Prediction] = []
    times: list[float] = []
    for base in [base for base in bases if base.least_memory <= device.memory]:
        if len(times) >= _EXAMINED or (len(times) >= _CERTAIN and base.least_time > times[_CERTAIN - 1]):
            break
        for prediction in _scheduled(base):
            if _needed(prediction) <= device.memory:
                fitting.append(prediction)
                insort(times, prediction.time.total)
    known = {id(prediction) for prediction in fitting}
    thrifty = [prediction for base in _smallest_layouts(bases) for prediction in _scheduled(base)]
    fitting += [one for one in thrifty if id(one) not in known and _needed(one) <= device.memory]
    fitting.sort(key=lambda prediction: prediction.time.total)
    possible = [prediction for prediction in thrifty if _needed(prediction) < math.inf]
    return Found(fitting, len(bases), min(possible, key=_needed, default=None))


def refusal(workload: Workload, devices: int, device: Device) -> D9dError | None:
    """Reason why the model does not support the simplest layout, which splits no dimension; ``None`` if it does."""
    for layout in layouts(workload, devices, device.node):
        try:
            Prediction(workload, layout, device).least_time  # noqa: B018 - the value is cached
        except D9dError as error:
            return error
        break
    return None


def _by_least_time(workload: Workload, devices: int, device: Device) -> list[Prediction]:
    """Layouts that the model supports, without a schedule, ordered by a lower bound of their time.

    Of several layouts with equal costs, only the first is kept.
    """
    found, seen = [], set()
    for layout in layouts(workload, devices, device.node):
        # Layouts with settings that have no effect on this mesh have equal costs.
        same = (*layout.mesh.sizes().values(), layout.microbatch, workload.strategy(layout))
        if same in seen:
            continue
        seen.add(same)
        prediction = Prediction(workload, layout, device)
        try:
            prediction.least_time  # noqa: B018 - the value is cached
        except D9dError:
            continue
        found.append(prediction)
    found.sort(key=lambda prediction: prediction.least_time)
    return found


def _scheduled(base: Prediction) -> Iterator[Prediction]:
    """Yield the layout with each available schedule; if ``pp`` is 1, yield only the layout itself."""
    if base.layout.mesh.pp == 1:
        yield base
        return
    for schedule in base.workload.options.schedules:
        yield replace(base, layout=replace(base.layout, pipeline=schedule))


def _smallest_layouts(legal: Sequence[Prediction]) -> list[Prediction]:
    """For each number of pipeline and tensor ranks and each microbatch, the layout that needs the least memory."""
    found: dict[tuple[int, int, int], list[Prediction]] = {}
    for prediction in legal:
        layout = prediction.layout
        if layout.microbatch <= _SMALL:
            found.setdefault((layout.mesh.pp, layout.mesh.tp, layout.microbatch), []).append(prediction)
    return [min(members, key=lambda member: member.least_memory) for members in found.values()]


def _needed(prediction: Prediction) -> float:
    """Bytes that a layout needs; infinite if its schedule is invalid."""
    try:
        return prediction.memory.needed
    except D9dError:
        return math.inf


def layouts(workload: Workload, devices: int, node: int) -> Iterator[Layout]:
    """Layouts on a number of devices whose sizes divide the devices and the batch; the model is not considered.

    Tensor parallelism is limited to a machine, whose links are ten times as fast as the network.
    """
    job, options = workload.job, workload.options
    for pp in _divisors_up_to(devices, _MOST_STAGES if options.schedules else 1):
        for tp in _divisors_up_to(devices // pp, node if options.strategies("tp") else 1):
            for cp in _divisors_up_to(devices // pp // tp, _MOST_CONTEXT if options.strategies("cp") else 1):
                data = devices // pp // tp // cp
                if job.batch.size % data:
                    continue
                for shards in _shards(data, max(1, node // tp // cp), options.fixed.get("dp_replicate")):
                    mesh = Mesh(pp=pp, tp=tp, cp=cp, dp_shard=shards, dp_replicate=data // shards)
                    if all(mesh.sizes()[axis] == size for axis, size in options.fixed.items()):
                        yield from _layouts_on(mesh, options, job.batch.size // data)


def _layouts_on(mesh: Mesh, options: Options, share: int) -> Iterator[Layout]:
    """Layouts on a mesh, with all sizes of ``ep``; each data-parallel rank has ``share`` samples of a step."""
    for ep in options.expert_groups(mesh):
        spread = mesh.model_copy(update={"ep": ep})
        # Settings that reduce after the last microbatch have no effect with a single microbatch.
        several = {waits: options.parallel(spread, waits) for waits in (False, True)}
        for microbatch in _divisors_up_to(share, _MOST_MICROBATCH):
            count = share // microbatch
            if count > MAX_MICROBATCHES:
                continue
            for recomputing, strategies in product(([], *options.recomputing), several[count > 1]):
                parallel = (*options.kept, *recomputing, *strategies)
                size = share * mesh.data_parallel_size
                yield Layout(spread, parallel, None, size, microbatch)


def _shards(data: int, within: int, replicas: int | None = None) -> list[int]:
    """Sizes of ``dp_shard`` to try: 1, the devices of one machine or of a few machines, and all ranks.

    With a fixed number of replicas there is one size at most.
    """
    if replicas is not None:
        return [] if data % replicas else [data // replicas]
    return [count for count in divisors(data) if count in {1, within, 4 * within, 16 * within, data}]


def _divisors_up_to(number: int, most: int) -> list[int]:
    return [count for count in divisors(number) if count <= most]
