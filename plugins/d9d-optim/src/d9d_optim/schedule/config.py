"""Configs of learning-rate schedules."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig, Section
from pydantic import Field, field_validator, model_validator

CurveName = Literal["linear", "cosine", "poly", "exponential"]


class ConstantConfig(PluginConfig):
    """Schedule of a constant learning rate."""

    name: Literal["constant"] = "constant"
    """Selects the plugin."""


class CosineConfig(PluginConfig):
    """Schedule of a linear warm-up, then half a cosine."""

    name: Literal["cosine"] = "cosine"
    """Selects the plugin."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the factor rises linearly to 1; the first uses 1/warmup_steps, the last 1."""
    min_factor: float = Field(default=0.1, ge=0, le=1)
    """Factor of the last step."""


class Phase(Section):
    """Config of one phase of a piecewise schedule. Without ``steps`` and ``until`` it takes the rest."""

    steps: int | None = Field(default=None, ge=1)
    """Length in steps."""
    until: float | None = Field(default=None, gt=0, le=1)
    """Or: the fraction of all steps at which it ends, so that 0.8 ends it after 80 % of the run."""
    to: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    """Factor that it reaches in its last step."""
    curve: CurveName = "linear"
    """Shape of the way there: linear, cosine, poly or exponential."""
    power: float | None = Field(default=None, gt=0, le=100)
    """Exponent of ``poly`` (2 if absent): above 1 it moves fast first and slowly at the end."""

    @model_validator(mode="after")
    def _one_length(self) -> Phase:
        if self.steps is not None and self.until is not None:
            raise ValueError("has steps and until; give one of them, or neither to take the rest")
        if self.power is not None and self.curve != "poly":
            raise ValueError(f"power belongs to curve 'poly', not to '{self.curve}'; remove it or change the curve")
        return self


class PiecewiseConfig(PluginConfig):
    """Schedule of a chain of phases; each begins at the factor the one before it reached."""

    name: Literal["piecewise"] = "piecewise"
    """Selects the plugin."""
    start: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Factor from which the first phase departs."""
    phases: tuple[Phase, ...]
    """The phases in order; together they must fill the run exactly."""

    @field_validator("phases")
    @classmethod
    def _only_last_takes_the_rest(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        if not phases:
            raise ValueError("needs at least one phase, for example {to: 1.0}")
        for index, phase in enumerate(phases[:-1]):
            if phase.steps is None and phase.until is None:
                raise ValueError(f"phase {index} has no length, but only the last may take the rest; set steps")
        return phases

    @model_validator(mode="after")
    def _exponential_needs_positive_ends(self) -> PiecewiseConfig:
        begin = self.start
        for index, phase in enumerate(self.phases):
            if phase.curve == "exponential" and 0 in (begin, phase.to):
                raise ValueError(
                    f"phase {index} goes exponentially from {begin:g} to {phase.to:g}, but no exponential curve "
                    "reaches zero; use a small positive factor or another curve"
                )
            begin = phase.to
        return self
