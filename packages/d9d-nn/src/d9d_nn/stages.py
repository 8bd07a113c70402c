"""Division of layers into pipeline stages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from d9d_core.errors import BuildError
from d9d_core.model import Stage


def stage_layers(layers: int, stage: Stage, *, first: float = 0.0, last: float = 0.0) -> range:
    """Layers of one stage. Stages are contiguous, and each has at least one layer.

    If the job does not state the number of layers of each stage (:attr:`Stage.layers`), the division minimises the cost
    of the most expensive stage; among equal solutions, earlier stages have more layers.

    Args:
        layers: layers of the whole model, all of about the same cost.
        stage: pipeline stage.
        first: additional cost of the first stage, such as an embedding, in units of one layer.
        last: additional cost of the last stage, such as the heads, in units of one layer.

    Raises:
        BuildError: there are more stages than layers, or the job's numbers of layers do not fit the model.
    """
    counts = _balanced(layers, stage.count, first, last) if stage.layers is None else _given(layers, stage)
    ends = list(accumulate(counts))
    return range(ends[stage.index] - counts[stage.index], ends[stage.index])


def _balanced(layers: int, count: int, first: float, last: float) -> Sequence[int]:
    """Number of layers of each stage: one layer each, then each further layer goes to the cheapest stage."""
    if count > layers:
        raise BuildError(
            f"{layers} layers cannot be split over {count} pipeline stages, each of which needs one; lower mesh.pp or "
            f"pipeline.stages_per_rank to at most {layers} stages in all, or give the model more layers"
        )
    counts = [1] * count
    costs = [1.0] * count
    costs[0] += first
    costs[-1] += last
    heap = [(cost, index) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    for _ in range(layers - count):
        cost, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (cost + 1, index))
    return counts


def _given(layers: int, stage: Stage) -> Sequence[int]:
    """Numbers of layers that the job states in ``pipeline.layers``, after a check that they fit the model."""
    counts = stage.layers
    assert counts is not None
    if len(counts) != stage.count:
        raise BuildError(
            f"pipeline.layers has {len(counts)} numbers, but there are {stage.count} stages; give one for each stage, "
            "or remove the field to balance stages automatically"
        )
    if sum(counts) != layers or min(counts) < 1:
        raise BuildError(
            f"pipeline.layers is {list(counts)}, {sum(counts)} in all, but the model has {layers} layers; give each "
            f"stage one or more, {layers} in all, or remove it to balance stages automatically"
        )
    return counts
