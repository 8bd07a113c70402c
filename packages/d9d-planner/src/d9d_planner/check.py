"""Memory prediction for ``d9d check``, with alternatives for a job that does not fit. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from d9d_core.errors import D9dError, JobError
from d9d_core.job import JobFile
from d9d_core.layout.mend import edit
from d9d_core.terminal.console import console_for, key_value_table

from d9d_planner.device import Device
from d9d_planner.layout import Layout
from d9d_planner.options import divisors
from d9d_planner.prediction import Prediction
from d9d_planner.report import advice, largest, memory_line
from d9d_planner.search import search
from d9d_planner.workload import Workload

_GIB = 2**30
_SHOWN = 3
#: If fewer than three layouts on the job's devices fit, layouts on these multiples of their number are tried.
_MORE_DEVICES = (2, 4, 8)
#: Device whose rates are used to predict times, and whose memory is used by default.
_DEVICE = "h200"


def check_predictions(job: JobFile, _world_size: int | None, memory: int | None) -> None:
    """Predict the memory of a job and print it.

    Args:
        job: job to predict.
        memory: device memory in bytes that the job must fit into; ``None`` skips this check.

    Raises:
        JobError: the job does not fit; the text has the cheapest alternatives.
        D9dError: ``memory`` is given, and the job cannot be predicted.
    """
    from d9d_engine.compose.communication.nodes import processes_of_node  # imports torch; predictions themselves do not

    table = key_value_table()
    for number, line in enumerate(predicted(job, memory, processes_of_node(job.device))):
        table.add_row("" if number else "predicted", line)
    console_for().print(table)


def predicted(job: JobFile, memory: int | None, node: int | None = None) -> list[str]:
    """Lines of ``d9d check`` about a job's predicted memory, and about tensor parallelism between machines.

    If the job cannot be predicted, the text gives the reason.

    Args:
        job: job to predict.
        memory: device memory in bytes that the job must fit into; ``None`` skips this check.
        node: number of devices per machine; by default as in the rates of the default device.

    Raises:
        JobError: the job does not fit; the text has the cheapest alternatives.
        D9dError: ``memory`` is given, and the job cannot be predicted.
    """
    device = Device.named(_DEVICE)
    if memory is not None:
        device = device.model_copy(update={"memory_gib": memory / 2**30})
    if node is not None:
        device = device.model_copy(update={"node": node})
    try:
        workload = Workload(job, job.registry, job.views())
        prediction = Prediction(workload, Layout.of(job), device)
        lines = [memory_line(prediction)]
    except D9dError as error:
        if memory is not None:
            raise
        return [f"not predicted: {error}"]
    if memory is not None:
        check_memory(prediction)
    return [*lines, *workload.notes, *_between_nodes(prediction)]


def _between_nodes(prediction: Prediction) -> Iterator[str]:
    """Yield a line about the time of tensor parallelism between machines, if there is any."""
    tp, node = prediction.layout.mesh.tp, prediction.device.node
    if tp > node:
        time = prediction.time
        part = time.parts["tensor parallelism"] / time.total
        yield f"tp {tp} over nodes of {node} devices takes {part:.0%} of a step of {time.total:.3g} s"


def check_memory(prediction: Prediction) -> None:
    """Check that a job's predicted memory fits.

    Raises:
        JobError: the job does not fit; the text has the cheapest alternatives with their predicted costs.
    """
    if prediction.fits:
        return
    memory, device = prediction.memory, prediction.device
    text = (
        f"this job needs {memory.needed / _GIB:.1f} GiB on a device ({largest(prediction)}), which has "
        f"{device.memory / _GIB:.1f} GiB"
    )
    ways = ways_out(prediction)
    if not ways:
        do = advice(prediction, "use a smaller model")
        raise JobError(f"{text}; no layout on up to {_MORE_DEVICES[-1]} times as many devices fits: {do}")
    lines = [f"{number}. {_alternative_text(prediction, way)}" for number, way in enumerate(ways, 1)]
    raise JobError("\n".join([f"{text}; the cheapest alternatives:", *lines]))


def ways_out(prediction: Prediction) -> list[Prediction]:
    """At most three layouts that fit, in order of device seconds per step (time x devices).

    Variants of the job's own layout are preferred. Only if fewer than three of them fit, the fastest layouts on as many
    devices, then on 2, 4 and 8 times as many, are added until there are three.
    """
    found = [near for near in _nearby(prediction) if _is_usable(near)]
    devices = prediction.layout.mesh.world_size
    for factor in (1, *_MORE_DEVICES):
        if len(found) >= _SHOWN:
            break
        ranked = search(prediction.workload, devices * factor, prediction.device).ranked
        found += [one for one in ranked[:_SHOWN] if _is_usable(one)]
    found.sort(key=lambda way: way.time.total * way.layout.mesh.world_size)
    return found[:_SHOWN]


def _alternative_text(job: Prediction, way: Prediction) -> str:
    """Text about an alternative layout: predicted time and memory, and the edit of the job file."""
    devices = way.layout.mesh.world_size
    slower = way.time.total / job.time.total - 1
    here = f"{slower:+.0%} time a step" if devices == job.layout.mesh.world_size else f"{devices} devices"
    lines = edit(job.workload.job, way.layout.on(job.workload.job)).replace("\n", "\n   ")
    return f"{way.time.total:.3g} s a step ({here}), {way.memory.needed / _GIB:.1f} GiB:\n   {lines}"


def _is_usable(prediction: Prediction) -> bool:
    try:
        return prediction.fits and prediction.time.total > 0
    except D9dError:
        return False


def _nearby(prediction: Prediction) -> Iterator[Prediction]:
    """Variants of a layout: with recomputed blocks, smaller microbatches, or both."""
    layout, workload = prediction.layout, prediction.workload
    options = workload.options
    smaller = [size for size in divisors(layout.microbatch) if size < layout.microbatch]
    recomputes = workload.strategy(layout).recomputed > 0
    for recomputing in [[]] if recomputes else [[], *options.recomputing]:
        for microbatch in [*smaller, layout.microbatch]:
            if recomputing or microbatch != layout.microbatch:
                parallel = (*recomputing, *layout.parallel)
                yield replace(prediction, layout=replace(layout, parallel=parallel, microbatch=microbatch))
