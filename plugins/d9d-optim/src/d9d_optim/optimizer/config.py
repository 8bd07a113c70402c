"""Configs of optimizers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from d9d_core.config import LoadsCode, PluginConfig, Section
from pydantic import AfterValidator, Field, model_validator


def _is_share(beta: float) -> float:
    if not 0 <= beta < 1:
        raise ValueError(f"{beta} is not in [0, 1); a beta is the share of a running average kept per step")
    return beta


#: Share of a running average that is kept per step.
Beta = Annotated[float, AfterValidator(_is_share)]


class GroupRule(Section):
    """Settings of the parameters whose names match a pattern."""

    match: str = Field(min_length=1)
    """Pattern over whole parameter names: ``*`` is any text (dots included), ``?`` one character, ``[ab]`` a choice."""
    lr_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor on the base learning rate; 1 if absent. A rule of ``lr_scale: 1`` keeps parameters from later rules."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight decay of all matched parameters; if absent, the optimizer's for those of two or more dimensions."""

    @model_validator(mode="after")
    def _changes_something(self) -> GroupRule:
        if self.weight_decay is None and self.lr_scale is None:
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
    state_dtype: Literal["parameter", "float32"] | None = None
    """Number format of moments: each parameter's own, or float32 for narrower parameters, updated in float32 too;
    ``parameter`` if absent."""

    @property
    def wide_state(self) -> bool:
        """Whether moments are float32 at least."""
        return self.state_dtype == "float32"


class AdamFields(OptimizerConfig):
    """Shared fields of the Adam family."""

    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Shares of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    amsgrad: bool = False
    """Divide by the root of the largest second moment so far (one more state tensor)."""
    maximize: bool = False
    """Climb instead of descend."""


class AdamWConfig(AdamFields):
    """Optimizer AdamW."""

    name: Literal["adamw"] = "adamw"
    """Selects the plugin."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions; biases and norm weights get none unless a group says so."""

    master_weights: bool = False
    """Train bfloat16 parameters as float32 weights, whose lower 16 bits are optimizer state; moments are float32."""
    state_dtype: Literal["parameter", "float32"] | None = None
    """Number format of moments: each parameter's own, or float32 for narrower parameters, updated in float32 too;
    if absent ``float32`` with ``master_weights``, else ``parameter``."""

    @property
    def wide_state(self) -> bool:
        """Whether moments are float32 at least."""
        return self.master_weights or self.state_dtype == "float32"

    @model_validator(mode="after")
    def _have_wide_moments(self) -> AdamWConfig:
        if self.master_weights and self.state_dtype == "parameter":
            raise ValueError("master_weights has float32 moments; leave state_dtype out")
        return self


class AdamConfig(AdamFields):
    """Optimizer Adam."""

    name: Literal["adam"] = "adam"
    """Selects the plugin."""
    decoupled_weight_decay: bool = False
    """Decay weights apart from the gradient, as ``adamw`` does, instead of adding the decay to it."""


class SGDConfig(OptimizerConfig):
    """Optimizer SGD: stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    """Selects the plugin."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the velocity that is kept per step; 0 keeps no state."""
    dampening: float = Field(default=0.0, ge=0, lt=1)
    """Share of each gradient but the first that the velocity does not take; needs momentum."""
    nesterov: bool = False
    """Look ahead along the velocity; needs momentum and no dampening."""
    maximize: bool = False
    """Climb instead of descend."""

    @model_validator(mode="after")
    def _need_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum (0.9 is usual) or leave nesterov out")
        if self.dampening and self.momentum == 0:
            raise ValueError("dampening needs a momentum above 0; set momentum (0.9 is usual) or leave dampening out")
        if self.nesterov and self.dampening:
            raise ValueError("nesterov is defined without dampening only; leave one of them out")
        return self


class LionConfig(OptimizerConfig):
    """Optimizer Lion."""

    name: Literal["lion"] = "lion"
    """Selects the plugin."""
    lr: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    """Base learning rate, by which each weight moves; a third to a tenth of AdamW's is usual."""
    weight_decay: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions; three to ten times AdamW's is usual."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Share of the average in the sign, and share of it that is kept per step, each in [0, 1)."""


class StochasticAdamWConfig(OptimizerConfig):
    """Optimizer AdamW with stochastic rounding of bfloat16 weights."""

    name: Literal["stochastic_adamw"] = "stochastic_adamw"
    """Selects the plugin."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions; biases and norm weights get none unless a group says so."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Shares of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    state_dtype: Literal["parameter", "float32"] = "float32"
    """Number format of moments: float32, or each parameter's own, bfloat16 then rounded stochastically too."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Start of the generator of the rounding, whose state is saved in checkpoints."""


class AdamWPart(Section):
    """Settings of the parameters that Muon leaves to AdamW."""

    match: tuple[str, ...] | None = None
    """Patterns of matrices that AdamW updates too, each of which must match one; if absent ``*embed*``, ``*head.*`` and
    ``*heads.*``, as far as there are such parameters. AdamW always updates those of one dimension."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate of these parameters; the schedule's factor and a group's ``lr_scale`` multiply it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Shares of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of matrices that AdamW updates."""
        return ("*embed*", "*head.*", "*heads.*") if self.match is None else self.match


class MuonConfig(OptimizerConfig):
    """Optimizer Muon for matrices, AdamW for all other parameters."""

    name: Literal["muon"] = "muon"
    """Selects the plugin."""
    lr: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Base learning rate of matrices; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of parameters of two or more dimensions, times the learning rate of each."""
    momentum: Beta = 0.95
    """Share of the average of gradients that is kept per step."""
    nesterov: bool = True
    """Look ahead along the average."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the iteration's polynomial of degree 5."""
    eps: float = Field(default=1e-7, gt=0, allow_inf_nan=False)
    """Least norm by which a matrix is divided before the iterations."""
    adjust_lr: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "original"
    """Factor on the learning rate by shape, rows x columns: ``sqrt(max(1, rows / columns))``;
    ``0.2 sqrt(max(rows, columns))``, with which AdamW's learning rate fits; or ``sqrt(rows / columns)``."""
    adamw: AdamWPart = AdamWPart()
    """Settings of the parameters that are no matrices of hidden layers."""


class ScheduleFreeConfig(OptimizerConfig):
    """Optimizer schedule-free AdamW. Use it with a warm-up and then a constant learning rate."""

    name: Literal["schedule_free"] = "schedule_free"
    """Selects the plugin."""
    lr: float = Field(default=2.5e-3, ge=0, allow_inf_nan=False)
    """Base learning rate, one to ten times that of AdamW with a schedule."""
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Beta] = (0.9, 0.999)
    """Share of the average in the point of the gradient, above 0, and of the squares' average that is kept per step."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    weight_power: float = Field(default=2.0, ge=0, le=10)
    """Power of the largest learning rate so far in the weight of a step in the average."""
    state_dtype: Literal["parameter", "float32"] = "float32"
    """Number format of the state: each parameter's own, or float32 for narrower parameters."""


class TorchConfig(OptimizerConfig):
    """Optimizer of any class that derives from ``torch.optim.Optimizer``."""

    name: Literal["torch"] = "torch"
    """Selects the plugin."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    target: Annotated[str, LoadsCode(lambda path: not path.startswith("torch.optim."))] = Field(min_length=1)
    """Import path of the class, such as ``torch.optim.RAdam``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class by name, besides parameters, ``lr`` and ``weight_decay``."""
