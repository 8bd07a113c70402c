"""Configs of the fine-tuning methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from d9d_core.config import PathOrAddress, PluginConfig
from d9d_core.job_file.open_union import Named
from pydantic import Field, field_validator, model_validator

from d9d_peft.patterns import first_match

#: Value of ``targets`` that selects all linear layers inside the model.
ALL_LINEAR = "all-linear"


def as_list(value: Any) -> Any:
    """Return patterns as a list; a single pattern may be given as a string."""
    return [value] if isinstance(value, str) else value


class LowRankConfig(PluginConfig):
    """Base of the methods that add low-rank updates: products of two small trained matrices, added to weights."""

    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get a low-rank update: ``all-linear``, last parts of names (``q_proj``), or patterns of whole names
    (``layers.1?.attention.*``). For ``lora`` also embeddings, heads and stacked weights of experts."""
    exclude: tuple[str, ...] = ()
    """Targets that get no update, written like ``targets``."""
    r: int = Field(default=16, ge=1)
    """Rank of the updates; at most the smaller side of each matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """Numerator of the updates' factor ``alpha / r``."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Ranks of single targets instead of ``r``: a mapping from patterns, written like ``targets``, to ranks. The first
    pattern that matches a target decides."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Numerators of single targets instead of ``alpha``: a mapping from patterns to numerators, like
    ``rank_pattern``."""
    modules_to_save: tuple[str, ...] = ()
    """Further modules whose parameters are all trained and are saved with the adapter, such as ``heads.*`` or ``norm``,
    written like ``targets``; these modules get no update. Not for a tied embedding or head."""
    rs_lora: bool = False
    """Multiply updates by ``alpha / sqrt(r)`` instead of ``alpha / r``, so that high ranks learn as fast as low ones
    (Kalajdzievski 2023, "rsLoRA")."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of a low-rank update's inputs that is dropped in training; the layer's own input is unchanged."""
    init_from: PathOrAddress | None = None
    """Adapter to start from: a directory in the format of the ``peft`` library, or an fsspec address of one."""

    _lists = field_validator("targets", "exclude", "modules_to_save", mode="before")(as_list)

    @model_validator(mode="after")
    def _something_is_wanted(self) -> Self:
        if not self.targets:
            raise ValueError(f"targets is empty; write [{ALL_LINEAR}] or name layers, such as [q_proj, v_proj]")
        return self

    def rank_of(self, target: str) -> int:
        """Rank of the update of a target."""
        pattern = first_match(target, self.rank_pattern)
        return self.r if pattern is None else self.rank_pattern[pattern]

    def alpha_of(self, target: str) -> float:
        """Numerator of the factor of a target's update."""
        pattern = first_match(target, self.alpha_pattern)
        return self.alpha if pattern is None else self.alpha_pattern[pattern]

    def scale_of(self, target: str) -> float:
        """Factor of the update of a target."""
        rank = self.rank_of(target)
        return self.alpha_of(target) / (rank**0.5 if self.rs_lora else rank)


class LoraConfig(LowRankConfig):
    """Low-rank updates of linear layers (Hu et al. 2021, "LoRA")."""

    name: Literal["lora"] = "lora"
    """Selects the plugin."""


class DoraConfig(LowRankConfig):
    """Low-rank updates of the directions of a weight's rows, and trained row magnitudes (Liu et al. 2024, "DoRA")."""

    name: Literal["dora"] = "dora"
    """Selects the plugin."""


class FullTuneConfig(PluginConfig):
    """Training of all parameters of some layers; all other parameters are frozen."""

    name: Literal["full_tune"] = "full_tune"
    """Selects the plugin."""
    match: tuple[str, ...]
    """Modules or parameters to train: last parts of names (``norm``), or patterns of whole names (``heads.*``)."""

    _lists = field_validator("match", mode="before")(as_list)

    @model_validator(mode="after")
    def _something_is_wanted(self) -> Self:
        if not self.match:
            raise ValueError("match is empty; name layers, such as [heads.*]")
        return self


class StackConfig(PluginConfig):
    """Several methods on one model, on different layers."""

    name: Literal["stack"] = "stack"
    """Selects the plugin."""
    methods: tuple[Annotated[PluginConfig, Named("peft method")], ...]
    """Methods in order of injection, each written as under ``peft``; a method may be a stack. At most one method may
    add parameters to a layer."""

    @model_validator(mode="after")
    def _all_of_it_can_be_done(self) -> Self:
        if len(self.methods) < 2:
            raise ValueError("methods has fewer than two entries; write a single method under peft itself")
        for number, method in enumerate(self.methods):
            if getattr(method, "init_from", None) is not None:
                raise ValueError(f"methods[{number}].init_from: a stack cannot start from adapter files; remove it")
        return self
