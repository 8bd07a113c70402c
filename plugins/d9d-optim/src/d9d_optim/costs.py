"""Costs of the optimizers for each parameter, from their configs alone. Imports no torch."""

from __future__ import annotations

from d9d_core.extend import OptimizerCost

from d9d_optim.optimizer.config import AdamFields, OptimizerConfig, SGDConfig

_FLOAT32 = 4


def _cost(config: OptimizerConfig, width: int, moments: int) -> OptimizerCost:
    """Cost of an update that reads the gradient, and reads and writes the parameter and all moments."""
    state = moments * (_FLOAT32 if config.state_dtype == "float32" else width)
    return OptimizerCost(state, traffic=3 * width + 2 * state)


def adam(config: AdamFields, width: int) -> OptimizerCost:
    """Cost of ``adam`` and ``adamw``: two moments, with ``amsgrad`` three."""
    return _cost(config, width, 3 if config.amsgrad else 2)


def two_moments(config: OptimizerConfig, width: int) -> OptimizerCost:
    """Cost of ``stochastic_adamw`` and ``schedule_free``: two tensors of state."""
    return _cost(config, width, 2)


def one_moment(config: OptimizerConfig, width: int) -> OptimizerCost:
    """Cost of ``lion``: one moment."""
    return _cost(config, width, 1)


def sgd(config: SGDConfig, width: int) -> OptimizerCost:
    """Cost of ``sgd``: a velocity, if there is momentum."""
    return _cost(config, width, 1 if config.momentum else 0)
