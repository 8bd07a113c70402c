"""Configs of learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from d9d_core.config import LoadsCode, PluginConfig, Section, closest
from pydantic import AfterValidator, Field, field_validator, model_validator

#: Names of the built-in curves.
CURVES = ("linear", "cosine", "poly", "poly_late", "exponential", "inverse_sqrt")


def _is_known(curve: str) -> str:
    if curve in CURVES or "." in curve or ":" in curve:
        return curve
    near = closest(curve, CURVES)
    raise ValueError(
        f"'{curve}' is no curve{f'; did you mean {near!r}?' if near else ''} There are {', '.join(map(repr, CURVES))}; "
        "or write the import path of a function, package.module:name"
    )


#: Name of a built-in curve, or import path of a function.
CurveName = Annotated[str, Field(min_length=1), AfterValidator(_is_known), LoadsCode(lambda curve: curve not in CURVES)]


class ConstantConfig(PluginConfig):
    """Schedule of a constant learning rate."""

    name: Literal["constant"] = "constant"
    """Selects the plugin."""


class WarmedUpConfig(PluginConfig):
    """Base of the schedules that begin with a linear warm-up of any length."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the factor rises linearly to 1; the first uses 1/warmup_steps, the last 1."""
    warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Fraction of all steps that warm up, instead of ``warmup_steps``."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_fraction is not None:
            raise ValueError("warmup_steps and warmup_fraction are both set; set only one")
        return self

    def warmup(self, total_steps: int) -> int:
        """Number of steps that warm up in a run of ``total_steps`` steps."""
        return self.warmup_steps if self.warmup_fraction is None else round(self.warmup_fraction * total_steps)


class CosineConfig(WarmedUpConfig):
    """Schedule of a linear warm-up, then a decay along half a cosine."""

    name: Literal["cosine"] = "cosine"
    """Selects the plugin."""
    min_factor: float = Field(default=0.1, ge=0, le=1)
    """Factor of the last step."""


class LinearConfig(WarmedUpConfig):
    """Schedule of a linear warm-up, then linear decay."""

    name: Literal["linear"] = "linear"
    """Selects the plugin."""
    min_factor: float = Field(default=0.0, ge=0, le=1)
    """Factor of the last step."""


class WarmupStableDecayConfig(WarmedUpConfig):
    """Schedule of a linear warm-up, a long constant phase, and a decay at the end."""

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Selects the plugin."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of the decay; by default ``decay_fraction`` of the run."""
    decay_fraction: float | None = Field(default=None, gt=0, le=1)
    """Fraction of all steps that decay, instead of ``decay_steps``; 0.1 if both are absent."""
    curve: Literal["linear", "cosine", "poly", "poly_late"] = "linear"
    """Curve of the decay, as in a phase of ``piecewise``."""
    min_factor: float = Field(default=0.0, ge=0, le=1)
    """Factor of the last step."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.decay_steps is not None and self.decay_fraction is not None:
            raise ValueError("decay_steps and decay_fraction are both set; set only one")
        return self


class InverseSqrtConfig(PluginConfig):
    """Schedule of a linear warm-up, then the inverse square root of the step."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    """Selects the plugin."""
    warmup_steps: int = Field(default=1000, ge=1)
    """Number of steps in which the factor rises linearly to 1; at step ``4 * warmup_steps`` the factor is 1/2."""


class TorchScheduleConfig(PluginConfig):
    """Schedule of any subclass of ``torch.optim.lr_scheduler.LRScheduler`` that depends only on the step."""

    name: Literal["torch"] = "torch"
    """Selects the plugin."""
    target: Annotated[str, LoadsCode(lambda path: not path.startswith("torch.optim."))] = Field(min_length=1)
    """Import path of the class, such as ``torch.optim.lr_scheduler.OneCycleLR``."""
    arguments: dict[str, Annotated[Any, LoadsCode(lambda text: ":" in text)]] = Field(default_factory=dict)
    """Arguments of the class by name, except the optimizer. Rates are factors on the base learning rate; text with a
    colon, ``package.module:name``, is imported; ``total_steps`` and ``T_max`` default to the run's steps."""


class Phase(Section):
    """Config of one phase of a piecewise schedule. Without ``steps`` and ``until`` it covers the remaining steps."""

    steps: int | None = Field(default=None, ge=1)
    """Length in steps."""
    until: float | None = Field(default=None, gt=0, le=1)
    """Alternative to ``steps``: the fraction of all steps at which the phase ends, such as 0.8."""
    to: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    """Factor in the last step of the phase."""
    curve: CurveName = "linear"
    """Curve to the factor ``to``: ``linear``, ``cosine``, ``poly``, ``poly_late``, ``exponential``, ``inverse_sqrt``,
    or the import path of a function of (begin, end, progress)."""
    power: float | None = Field(default=None, gt=0, le=100)
    """Exponent of ``poly`` and ``poly_late``, 2 by default: above 1, ``poly`` changes fastest at the start,
    ``poly_late`` at the end."""
    floor: float | None = Field(default=None, gt=0, le=1e6)
    """Lower bound of ``exponential`` between its ends, needed to start from or reach 0."""

    @model_validator(mode="after")
    def _one_length(self) -> Phase:
        if self.steps is not None and self.until is not None:
            raise ValueError("steps and until are both set; set one of them, or neither to cover the remaining steps")
        if self.power is not None and self.curve not in ("poly", "poly_late"):
            raise ValueError(
                f"power belongs to curve 'poly' or 'poly_late', not to '{self.curve}'; remove it or change the curve"
            )
        if self.floor is not None and self.curve != "exponential":
            raise ValueError(
                f"floor belongs to curve 'exponential', not to '{self.curve}'; remove it or change the curve"
            )
        return self


class PiecewiseConfig(PluginConfig):
    """Schedule of a chain of phases; each phase starts at the factor that the previous phase reached."""

    name: Literal["piecewise"] = "piecewise"
    """Selects the plugin."""
    start: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Factor at which the first phase starts."""
    phases: tuple[Phase, ...]
    """Phases in order; together they must cover the run exactly."""

    @field_validator("phases")
    @classmethod
    def _only_last_takes_the_rest(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        if not phases:
            raise ValueError("needs at least one phase, for example {to: 1.0}")
        for index, phase in enumerate(phases[:-1]):
            if phase.steps is None and phase.until is None:
                raise ValueError(f"phase {index} has no length, but only the last may cover the rest; set its steps")
        return phases

    @model_validator(mode="after")
    def _positive_ends(self) -> PiecewiseConfig:
        begin = self.start
        for index, phase in enumerate(self.phases):
            if phase.curve == "exponential" and phase.floor is None and 0 in (begin, phase.to):
                raise ValueError(
                    f"phase {index} is exponential from {begin:g} to {phase.to:g}, but this curve can neither begin "
                    "nor end at zero; give it a floor, or use a small positive factor or another curve"
                )
            if phase.curve == "inverse_sqrt" and 0 in (begin, phase.to):
                raise ValueError(
                    f"phase {index} is an inverse square root from {begin:g} to {phase.to:g}, but this curve can "
                    "neither begin nor end at zero; use a small positive factor or another curve"
                )
            begin = phase.to
        return self
