"""FLOPs of a token that a fine-tuning method saves, and those that it adds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from d9d_core.config.job import JobConfig, Mesh
from d9d_core.plugin.registry import Registry
from d9d_core.program.costs import StageCost

from d9d_engine.planner.layout import Layout
from d9d_engine.planner.workload import Workload

#: Products of attention: two forward, four backward. Fused attention computes the scores again, which is not counted.
_ATTENTION_BACKWARD = 2.0


def tuning_flops(job: JobConfig, registry: Registry) -> float:
    """Difference of the FLOPs of a token with the job's fine-tuning method and without, as MFU counts them.

    A frozen weight has no gradient of its own: two FLOPs of six are left out. Before the first weight that trains there
    is no backward at all. Products that the method adds count like the rest.

    Raises:
        D9dError: nothing describes the costs of the model or of the method.
    """
    with_method, without = (
        _flops(Workload(one, registry, {}).stages(Layout(Mesh(), (), None, 1, 1), math.inf))
        for one in (job, job.model_copy(update={"peft": None}))
    )
    return (with_method - without) / Workload(job, registry, {}).length


def _flops(stages: Iterable[StageCost]) -> float:
    total = 0.0
    for stage in stages:
        for block in stage.blocks:
            for op in block.ops:
                backward = op.backward_flops
                if op.kind == "attention":
                    backward = _ATTENTION_BACKWARD * op.flops if op.backward_flops else 0.0
                total += block.count * (op.flops + backward)
    return total
