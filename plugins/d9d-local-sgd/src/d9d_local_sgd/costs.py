"""Effects of the strategies on the costs of a job, from their configs alone. Imports no torch."""

from __future__ import annotations

from d9d_core.cost import StrategyCost

from d9d_local_sgd.config import DiLoCoConfig, LocalSgdConfig

#: Bytes per parameter of the momentum of DiLoCo's outer steps, in float32.
_MOMENTUM = 4.0


def cost(config: LocalSgdConfig | DiLoCoConfig) -> StrategyCost:
    """Costs of the strategy: one all-reduce of all parameters over the replicas every ``period`` steps.

    ``diloco`` also keeps a copy of the parameters after the last outer step, in their dtype, and the momentum.
    """
    if isinstance(config, DiLoCoConfig):
        return StrategyCost(meets_every=config.period, state=_MOMENTUM, copies=1)
    return StrategyCost(meets_every=config.period)
