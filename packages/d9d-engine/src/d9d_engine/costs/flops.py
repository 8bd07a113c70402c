"""FLOPs per token that a fine-tuning method saves and adds. Imports no torch."""

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

#: FLOPs of attention's backward divided by its forward's: the backward has four matrix products, the forward two. The
#: product by which fused attention recomputes the scores is not counted.
_ATTENTION_BACKWARD = 2.0
#: Bytes per element; any value will do, as FLOPs do not depend on it.
_WIDTH = 4


def tuning_flops(job: JobConfig, peft: PluginConfig, length: int, registry: Registry) -> float:
    """FLOPs per token with a fine-tuning method minus the FLOPs without it, as MFU counts them.

    A frozen weight has no weight gradient, which saves two of its six FLOPs per parameter. There is no backward before
    the first trained weight. Matrix products that the method adds are counted in full.

    Args:
        job: job with the model.
        peft: config of the method.
        length: number of positions of a sample.
        registry: registry of the plugins.

    Raises:
        D9dError: the model or the method has no cost description.
    """
    model = choose(registry, "model", "model", job.model)
    if not isinstance(model.spec, ModelSpec) or model.spec.cost is None:
        raise JobError(f"model: {model.entry} has no cost description; its plugin must give ModelSpec.cost")
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
