"""Config of the task ``distillation``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from d9d_core.job_file.open_union import Named
from pydantic import Field, PositiveInt


class DistillationConfig(PluginConfig):
    """Task of learning a teacher's next-token distribution (Hinton et al. 2015)."""

    name: Literal["distillation"] = "distillation"
    """Selects the plugin."""
    teacher: Annotated[PluginConfig, Named("model")]
    """Config of the teacher, which runs in the model's layout; with the fields of ``model``; needs ``pretrained``."""
    head: str | None = None
    """The model's head to train, of kind causal_lm; needed if the model has several heads."""
    teacher_head: str | None = None
    """The teacher's head; needed if the teacher has several heads."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of both models; the divergence is multiplied by the square of the temperature."""
    top_k: PositiveInt | None = None
    """Learn the teacher's k most probable tokens, with probabilities that add up to one; null learns all tokens, and
    keeps the teacher's logits for a whole step."""
    soft_weight: float = Field(default=1.0, gt=0)
    """Coefficient of the divergence from the teacher."""
    hard_weight: float = Field(default=0.0, ge=0)
    """Coefficient of the cross entropy of the targets."""
