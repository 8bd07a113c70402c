"""Effects of the strategies on the costs of a job, from their configs alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from d9d_core.cost import StrategyCost

from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.data_parallel.config import DataParallelConfig, ReplicateConfig, ShardedConfig
from d9d_parallel.tensor_parallel.config import TensorParallelConfig

_REDUCES: dict[str, Literal["each", "replicas_last", "last"]] = {
    "nothing": "each",
    "all_reduce": "replicas_last",
    "everything": "last",
}
_WIDTHS = {"float32": 4, "bfloat16": 2}


def replicated(config: ReplicateConfig) -> StrategyCost:
    """Effect of ``replicate`` on costs: shards only over ``cp``, and at most one gather per microbatch."""
    units = StrategyCost(shards=True, gathers="once", reduces="each", in_place=config.needs_no_units)
    return _data_parallel(config, units)


def sharded(config: ShardedConfig) -> StrategyCost:
    """Effect of ``fsdp`` and ``hsdp`` on costs. Resharding to smaller groups is counted as resharding to all ranks."""
    gathers: Literal["once", "twice"] = "twice" if config.reshard_after_forward else "once"
    return _data_parallel(config, StrategyCost(shards=True, gathers=gathers, reduces="each"))


def _data_parallel(config: DataParallelConfig, effect: StrategyCost) -> StrategyCost:
    compute, summed = config.compute_dtype, config.reduce_dtype
    reduces: Literal["each", "replicas_last", "last"] = _REDUCES[config.defer]
    formats = StrategyCost(
        reduces=reduces,
        compute_width=None if compute is None else _WIDTHS[compute],
        reduce_width=None if summed is None else _WIDTHS[summed],
        offloads=config.offload,
    )
    return effect | formats


def alternatives(config: DataParallelConfig) -> Sequence[DataParallelConfig]:
    """Configs that communicate less and take more memory: gradients reduced once per step, parameters kept gathered."""
    later = config.model_copy(update={"defer": "everything"})
    found = [later] if config.defer == "nothing" else []
    if isinstance(config, ShardedConfig) and config.reshard_after_forward is True:
        found.append(later.model_copy(update={"reshard_after_forward": False}))
    return found


def tensor_parallel(config: TensorParallelConfig) -> StrategyCost:
    """Effect of ``tensor_parallel`` on costs: whether its collectives overlap with matrix products."""
    return StrategyCost(overlaps=frozenset({"tp"} if config.asynchronous else ()))


def checkpointed(config: ActivationCheckpointingConfig) -> StrategyCost:
    """Effect of ``activation_checkpointing`` on costs; of ``match`` and ``save``, only a saved ``attention`` counts."""
    return StrategyCost(recomputed=1 / config.every, keeps_attention="attention" in config.save)


def compiled(config: CompileConfig) -> StrategyCost:
    """Effect of ``compile`` on costs; backends other than inductor count as fusing nothing."""
    return StrategyCost(compiled=config.backend == "inductor")
