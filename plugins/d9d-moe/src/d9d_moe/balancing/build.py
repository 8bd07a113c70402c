"""From chosen names to balancers."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_moe.balancing.base import Balancer
from d9d_moe.balancing.bias import SignUpdate
from d9d_moe.balancing.config import AuxiliaryLossConfig, BiasUpdateConfig, ZLossConfig
from d9d_moe.balancing.losses import BatchBalance, SequenceBalance, ZLoss


def balancers(chosen: Iterable[AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig]) -> tuple[Balancer, ...]:
    """What :class:`d9d_moe.router.TopKRouter` takes as ``balancing``."""
    return tuple(_balancer(config) for config in chosen)


def _balancer(config: AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig) -> Balancer:
    if isinstance(config, BiasUpdateConfig):
        return SignUpdate(config.rate)
    if isinstance(config, ZLossConfig):
        return ZLoss(config.coefficient)
    kind = SequenceBalance if config.scope == "sequence" else BatchBalance
    return kind(config.coefficient)
