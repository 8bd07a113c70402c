"""Configs of optimizers."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig, Section
from pydantic import Field, field_validator, model_validator


class GroupRule(Section):
    """Settings of the parameters whose names match a pattern."""

    match: str = Field(min_length=1)
    """Pattern over whole parameter names: ``*`` is any text (dots included), ``?`` one character, ``[ab]`` a choice."""
    lr_scale: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Factor on the base learning rate."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight decay of all matched parameters; if absent, the optimizer's for those of two or more dimensions."""

    @model_validator(mode="after")
    def _changes_something(self) -> GroupRule:
        if self.weight_decay is None and "lr_scale" not in self.model_fields_set:
            raise ValueError(f"group {self.match!r} changes nothing; give it an lr_scale or a weight_decay")
        return self


class OptimizerConfig(PluginConfig):
    """Shared fields of all optimizers of this package."""

    lr: float = Field(ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions; biases and norm weights get none unless a group says so."""
    groups: tuple[GroupRule, ...] = ()
    """Exceptions by parameter name; the first matching pattern wins."""
    state_dtype: Literal["parameter", "float32"] = "parameter"
    """Number format of moments: each parameter's own, or float32 for narrower parameters, updated in float32 too."""


class AdamWConfig(OptimizerConfig):
    """Optimizer AdamW."""

    name: Literal["adamw"] = "adamw"
    """Selects the plugin."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions; biases and norm weights get none unless a group says so."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How much of the running averages of the gradient and of its square is kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""

    @field_validator("betas")
    @classmethod
    def _fractions(cls, betas: tuple[float, float]) -> tuple[float, float]:
        for beta in betas:
            if not 0 <= beta < 1:
                raise ValueError(f"{beta} is not in [0, 1); a beta is the share of a running average kept per step")
        return betas


class SGDConfig(OptimizerConfig):
    """Optimizer SGD: stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    """Selects the plugin."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the velocity that is kept per step; 0 keeps no state."""
    nesterov: bool = False
    """Look ahead along the velocity; needs momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum (0.9 is usual) or leave nesterov out")
        return self
