"""Configs of the task ``dpo`` and the metric ``preference``."""

from __future__ import annotations

from typing import Literal, Self

from d9d_core.config import PluginConfig
from pydantic import Field, model_validator


class DpoConfig(PluginConfig):
    """Task of direct preference optimisation (Rafailov et al. 2023, "DPO")."""

    name: Literal["dpo"] = "dpo"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to train, of kind causal_lm; needed if the model has several heads."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference model."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """``sigmoid``: equation 7 of the paper. ``hinge``: a margin of one (Zhao et al. 2023, "SLiC-HF"). ``ipo``: the
    squared distance to a margin of ``1 / (2 beta)``, per token (Azar et al. 2023, equation 17)."""
    normalize_length: bool = False
    """Divide the log-probability of each text by its number of targets; ``ipo`` always does."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that the texts of a pair are swapped (Mitchell 2023, "cDPO"); for ``sigmoid``."""
    reference: Literal["auto", "without_adapter", "copy", "stored"] = "auto"
    """The frozen model. ``without_adapter``: the trained model without its adapter (``peft``), which needs no memory.
    ``copy``: a copy of the model at the start of the run. ``stored``: the model at the start of the run, evaluated
    once on all data before the first step. ``auto``: ``without_adapter`` if there is an adapter, else ``copy``."""

    @model_validator(mode="after")
    def _smoothing_has_an_effect(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing has no effect with the loss '{self.loss}'; set it to 0")
        return self


class PreferenceMetricConfig(PluginConfig):
    """Metric of implicit rewards, their margin, and how often the chosen text has the higher reward."""

    name: Literal["preference"] = "preference"
    """Selects the plugin."""
