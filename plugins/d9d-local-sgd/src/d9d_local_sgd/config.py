"""Configs of the strategies ``local_sgd`` and ``diloco``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, PositiveFloat, PositiveInt


class LocalSgdConfig(PluginConfig):
    """Local SGD: every ``period`` steps, the parameters of all replicas are replaced by their mean."""

    name: Literal["local_sgd"] = "local_sgd"
    """Selects the plugin."""
    period: PositiveInt = 16
    """Number of optimizer steps after which the parameters are averaged again."""


class DiLoCoConfig(PluginConfig):
    """DiLoCo: every ``period`` steps, an outer SGD with Nesterov momentum applies the replicas' mean change."""

    name: Literal["diloco"] = "diloco"
    """Selects the plugin."""
    period: PositiveInt = 500
    """Number of inner optimizer steps that a replica takes between two outer steps; H in the paper."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer steps."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer steps; 0 is plain SGD."""
