"""Costs, for plans; imports no torch."""

from d9d_core.cost import OptimizerCost

from frozen_api_2.config import ChainConfig, MomentumConfig


def flops(config: ChainConfig, sequence_length: int) -> float:
    return 6.0 * config.depth * config.width**2


def momentum(config: MomentumConfig, width: int) -> OptimizerCost:
    return OptimizerCost(state=width, traffic=5 * width)
