"""Config of the metric ``auroc``."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class AurocConfig(PluginConfig):
    """Metric: area under the ROC curve of a binary problem."""

    name: Literal["auroc"] = "auroc"
    """Selects the plugin."""
    num_bins: Annotated[int, Field(ge=2, le=1 << 24)] = 10000
    """Number of equal bins of the probabilities from 0 to 1."""
    predictions: str = "class_logits"
    """Observation of the scores: [...], [..., 1], or [..., 2] of the negative and the positive class."""
    targets: str = "labels"
    """Observation of the classes 0 and 1, or -100 to ignore a sample: [...] or [..., 1]."""
    scores: Literal["logits", "probabilities"] = "logits"
    """Kind of the scores; probabilities outside 0 to 1 are counted in the first or last bin."""
    series: str = "auroc"
    """Name of the series."""

    @property
    def reads(self) -> Set[str]:
        """Names of the observations to read."""
        return {self.predictions, self.targets}
