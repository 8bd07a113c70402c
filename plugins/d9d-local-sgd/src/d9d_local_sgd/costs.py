"""Effects of the strategies on the costs of a job, from their configs alone. Imports no torch."""

from __future__ import annotations

from d9d_core.cost import StrategyCost

from d9d_local_sgd.config import DiLoCoConfig, LocalSgdConfig

#: Bytes per parameter of DiLoCo's tensors: the parameters after the last outer step, and the momentum, in float32.
_OUTER = 8.0


def cost(config: LocalSgdConfig | DiLoCoConfig) -> StrategyCost:
    """Effect on costs: one all-reduce of all parameters over the replicas every ``period`` steps.

    The tensors of ``diloco`` count as float32; in a job with narrower parameters they take less.
    """
    return StrategyCost(meets_every=config.period, state=_OUTER if isinstance(config, DiLoCoConfig) else 0.0)
