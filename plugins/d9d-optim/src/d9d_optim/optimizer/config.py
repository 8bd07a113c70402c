"""Configs of optimizers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from d9d_core.config import LoadsCode, PluginConfig, Section
from d9d_core.job_file.open_union import Named
from pydantic import AfterValidator, Field, model_validator


def _is_share(beta: float) -> float:
    if not 0 <= beta < 1:
        raise ValueError(f"{beta} is not in [0, 1); a beta is the fraction of a running average kept per step")
    return beta


#: Fraction of a running average that is kept per step.
Beta = Annotated[float, AfterValidator(_is_share)]


class GroupRule(Section):
    """Learning rate and weight decay of the parameters whose names match a pattern."""

    match: str = Field(min_length=1)
    """Pattern of whole parameter names: ``*`` matches any text (dots included), ``?`` one character, ``[ab]`` a
    choice."""
    lr_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor on the base learning rate, 1 by default. A rule with ``lr_scale: 1`` excludes parameters from later
    rules."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight decay of all matched parameters, also biases; by default the optimizer's, only for matched matrices."""

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
    """Weight decay of matrices (two or more dimensions); biases of any dimension and norm weights have none unless a
    group sets it."""
    groups: tuple[GroupRule, ...] = ()
    """Exceptions by parameter name; the first matching pattern wins."""
    state_dtype: Literal["parameter", "float32"] | None = None
    """Number format of moments: ``parameter``, the default, for each parameter's own, or ``float32`` for narrower
    parameters, whose updates are then computed in float32."""

    @property
    def wide_state(self) -> bool:
        """Whether moments are float32 or wider."""
        return self.state_dtype == "float32"


class AdamFields(OptimizerConfig):
    """Shared fields of the Adam family."""

    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Fractions of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Constant added to the root of the second moment."""
    amsgrad: bool = False
    """Divide by the root of the largest second moment so far (one more state tensor)."""
    maximize: bool = False
    """Maximise instead of minimise."""


class AdamWConfig(AdamFields):
    """Optimizer AdamW."""

    name: Literal["adamw"] = "adamw"
    """Selects the plugin."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices (two or more dimensions); biases of any dimension and norm weights have none
    unless a group sets it."""

    master_weights: bool = False
    """Train bfloat16 parameters as float32 weights, whose lower 16 bits are optimizer state; moments are float32."""
    state_dtype: Literal["parameter", "float32"] | None = None
    """Number format of moments: ``parameter`` for each parameter's own, or ``float32`` for narrower parameters, whose
    updates are then computed in float32; by default ``float32`` with ``master_weights``, else ``parameter``."""

    @property
    def wide_state(self) -> bool:
        """Whether moments are float32 or wider."""
        return self.master_weights or self.state_dtype == "float32"

    @model_validator(mode="after")
    def _have_wide_moments(self) -> AdamWConfig:
        if self.master_weights and self.state_dtype == "parameter":
            raise ValueError("master_weights requires float32 moments; remove state_dtype")
        return self


class AdamConfig(AdamFields):
    """Optimizer Adam."""

    name: Literal["adam"] = "adam"
    """Selects the plugin."""
    decoupled_weight_decay: bool = False
    """Apply weight decay to the weights, as ``adamw`` does, instead of adding it to the gradient."""


class SGDConfig(OptimizerConfig):
    """Optimizer SGD: stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    """Selects the plugin."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the velocity that is kept per step; 0 keeps no state."""
    dampening: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each gradient except the first that is not added to the velocity; needs momentum."""
    nesterov: bool = False
    """Nesterov momentum; needs momentum and no dampening."""
    maximize: bool = False
    """Maximise instead of minimise."""

    @model_validator(mode="after")
    def _need_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum (0.9 is usual) or remove nesterov")
        if self.dampening and self.momentum == 0:
            raise ValueError("dampening needs a momentum above 0; set momentum (0.9 is usual) or remove dampening")
        if self.nesterov and self.dampening:
            raise ValueError("nesterov is defined only without dampening; remove nesterov or dampening")
        return self


class LionConfig(OptimizerConfig):
    """Optimizer Lion."""

    name: Literal["lion"] = "lion"
    """Selects the plugin."""
    lr: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    """Base learning rate, the size of each weight's step; usually a third to a tenth of AdamW's."""
    weight_decay: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices (two or more dimensions, no biases); usually three to ten times AdamW's."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weights of the old average of gradients, each in [0, 1): the first when the sign of the update is computed from
    average and gradient, the second when the average is updated."""


class StochasticAdamWConfig(OptimizerConfig):
    """Optimizer AdamW with stochastic rounding of bfloat16 weights."""

    name: Literal["stochastic_adamw"] = "stochastic_adamw"
    """Selects the plugin."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of matrices (two or more dimensions); biases of any dimension and norm weights have none
    unless a group sets it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Fractions of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Constant added to the root of the second moment."""
    state_dtype: Literal["parameter", "float32"] = "float32"
    """Number format of moments: float32, or each parameter's own; bfloat16 moments are rounded stochastically too."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the generator for the rounding, whose state is saved in checkpoints."""


class AdamWPart(Section):
    """Settings of the parameters that AdamW updates instead of Muon."""

    match: tuple[str, ...] | None = None
    """Patterns of names of matrices for AdamW; each must match a parameter. By default ``*embed*``, ``*head.*`` and
    ``*heads.*``, which need not match. AdamW always updates parameters of one dimension."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate of these parameters; the schedule's factor and a group's ``lr_scale`` multiply it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Fractions of the running averages of the gradient and of its square that are kept per step, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Constant added to the root of the second moment."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the names of matrices that AdamW updates."""
        return ("*embed*", "*head.*", "*heads.*") if self.match is None else self.match


class MuonConfig(OptimizerConfig):
    """Optimizer Muon for matrices, AdamW for all other parameters."""

    name: Literal["muon"] = "muon"
    """Selects the plugin."""
    lr: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Base learning rate of matrices; the schedule's factor and a group's ``lr_scale`` multiply it."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Decoupled weight decay of all matrices (two or more dimensions, no biases), also of matrices that AdamW updates.
    A step multiplies it by the learning rate of the matrix, without the factor of ``adjust_lr``."""
    momentum: Beta = 0.95
    """Fraction of the average of gradients that is kept per step."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Number of Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the iteration's polynomial of degree 5."""
    eps: float = Field(default=1e-7, gt=0, allow_inf_nan=False)
    """Lower bound of the norm by which a matrix is divided before the iterations."""
    adjust_lr: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "original"
    """Factor on the learning rate for a matrix of rows x columns. ``original``: ``sqrt(max(1, rows / columns))``.
    ``match_rms_adamw``: ``0.2 sqrt(max(rows, columns))``, for which AdamW's learning rates fit.
    ``spectral_unclamped``: ``sqrt(rows / columns)``."""
    adamw: AdamWPart = AdamWPart()
    """Settings of the parameters that AdamW updates: all but the matrices of hidden layers."""


class ScheduleFreeConfig(OptimizerConfig):
    """Optimizer schedule-free AdamW. Use it with a warm-up and then a constant learning rate."""

    name: Literal["schedule_free"] = "schedule_free"
    """Selects the plugin."""
    lr: float = Field(default=2.5e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; usually one to ten times AdamW's with a schedule."""
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Beta] = (0.9, 0.999)
    """First: fraction of the averaged weights in the weights at which gradients are computed, above 0. Second: fraction
    of the average of squared gradients kept per step."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Constant added to the root of the second moment."""
    weight_power: float = Field(default=2.0, ge=0, le=10)
    """Exponent p: a step has the weight ``r ** p`` in the average of weights, r the largest learning rate so far."""
    state_dtype: Literal["parameter", "float32"] = "float32"
    """Number format of the state: each parameter's own, or float32 for narrower parameters."""


class EmaConfig(PluginConfig):
    """Averages of the weights over steps, on top of another optimizer; used for evaluation and export."""

    name: Literal["ema"] = "ema"
    """Selects the plugin."""
    of: Annotated[PluginConfig, Named("optimizer")]
    """Optimizer whose weights are averaged, written as under ``optimizer``."""
    decay: Beta | None = 0.999
    """Fraction of the average that is kept per step; null averages the weights of all steps equally (SWA)."""
    warmup: bool = True
    """Use at most the decay ``(1 + n) / (10 + n)`` in the n-th averaged step, so that short runs forget their initial
    weights."""
    start: int = Field(default=0, ge=0)
    """Steps before averaging starts; until then the average equals the weights."""
    apply: bool = True
    """Evaluate and export the averages; false only stores them in checkpoints, so that a later start can use them."""

    @property
    def lr(self) -> float:
        """Base learning rate of the averaged optimizer, 1 if it has none."""
        return float(getattr(self.of, "lr", 1.0))


class TorchConfig(OptimizerConfig):
    """Optimizer of any subclass of ``torch.optim.Optimizer``."""

    name: Literal["torch"] = "torch"
    """Selects the plugin."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Base learning rate; the schedule's factor and a group's ``lr_scale`` multiply it."""
    target: Annotated[str, LoadsCode(lambda path: not path.startswith("torch.optim."))] = Field(min_length=1)
    """Import path of the class, such as ``torch.optim.RAdam``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class by name, except parameters, ``lr`` and ``weight_decay``."""
