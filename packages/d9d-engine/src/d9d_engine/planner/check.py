"""Prediction of a job for ``d9d check``. Imports no torch."""

from __future__ import annotations

from d9d_core.errors import JobError
from d9d_core.job import JobFile

from d9d_engine.planner.device import Device
from d9d_engine.planner.layout import Layout
from d9d_engine.planner.prediction import Prediction
from d9d_engine.planner.report import memory_line
from d9d_engine.planner.ways_out import check_memory
from d9d_engine.planner.workload import Workload

#: Device whose rates count where a way out is priced, and whose memory where nobody named any.
_DEVICE = "h200"


def predicted(job: JobFile, memory: int | None) -> list[str]:
    """Lines about the predicted memory of a job; where nothing can be predicted, why.

    Args:
        job: the job.
        memory: bytes of a device's memory that it must fit into; any if absent.

    Raises:
        JobError: it does not fit, with the cheapest ways out; or memory was named and nothing can be predicted.
    """
    device = Device.named(_DEVICE)
    if memory is not None:
        device = device.model_copy(update={"memory_gib": memory / 2**30})
    try:
        workload = Workload(job, job.registry, job.views())
        prediction = Prediction(workload, Layout.of(job), device)
        lines = [memory_line(prediction)]
    except JobError as error:
        if memory is not None:
            raise
        return [f"not predicted: {error}"]
    if memory is not None:
        check_memory(prediction)
    return [*lines, *_wide(prediction), *workload.notes]


def _wide(prediction: Prediction) -> list[str]:
    """Warning of tensor parallelism that crosses machines, with its price."""
    tensor, device = prediction.layout.mesh.tp, prediction.device
    if tensor <= device.node:
        return []
    time = prediction.time
    part = time.parts["tensor parallelism"] / time.total
    return [
        f"warning: mesh.tp is {tensor}, wider than a machine of {device.node} devices: its collectives are predicted "
        f"to take {part:.0%} of a step of {time.total:.3g} s; use tp {device.node} or less, and cp or pp for the rest"
    ]
