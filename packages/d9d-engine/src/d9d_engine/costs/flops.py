"""FLOPs of a token that a fine-tuning method saves, and those that it adds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from d9d_core.config import PluginConfig
from d9d_core.cost import Share, StageCost
from d9d_core.errors import JobError
from d9d_core.job_file.inner import choose
from d9d_core.job_file.job import JobConfig
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry

from d9d_engine.costs.tuning import adapter_costs, tuned

#: Products of attention: two forward, four backward. Fused attention computes the scores again, which is not counted.
_ATTENTION_BACKWARD = 2.0
#: Share of one rank in one sample of so many positions. FLOPs depend on no number format.
_WIDTH = 4


def tuning_flops(job: JobConfig, peft: PluginConfig, length: int, registry: Registry) -> float:
    """FLOPs of a token with a fine-tuning method less the FLOPs without it, as MFU counts them.

    A frozen weight has no gradient of its own: two FLOPs of six are left out. Before the first weight that trains there
    is no backward at all. Products that the method adds count like the rest.

    Args:
        job: has the model.
        peft: config of the method.
        length: positions of a sample.
        registry: meaning of the names.

    Raises:
        D9dError: nothing describes the costs of the model or of the method.
    """
    model = choose(registry, "model", "model", job.model)
    if not isinstance(model.spec, ModelSpec) or model.spec.cost is None:
        raise JobError(f"model: {model.entry} has no cost description (ModelSpec.cost)")
    share = Share(1, length, 1, 1, 1, _WIDTH, False, math.inf)
    whole: list[StageCost] = [model.spec.cost.load()(job.model, Stage(0, 1), share)]
    return (_flops(tuned(whole, adapter_costs(peft, registry), share)) - _flops(whole)) / length


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
