"""Config section ``mtp`` of decoders: multi-token prediction. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from d9d_core.config import Section
from pydantic import Field, model_validator

#: Loss term of multi-token prediction; with several depths, each has a term with its number at the end.
TERM = "mtp_loss"


class MultiTokenPrediction(Section):
    """Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2)."""

    depths: int = Field(default=0, ge=0, le=8)
    """Number of further tokens that a position predicts in training, each by one more layer; 0: none."""

    weight: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    """Coefficient of the mean of all depths' losses in the training loss."""

    first: Literal["embedding", "hidden"] = "embedding"
    """First half of the input of each projection: the embedding of the later token, or the hidden state."""

    @model_validator(mode="before")
    @classmethod
    def _requires_depths(cls, values: Any) -> Any:
        # An explicit depths 0 may have other fields, because pretrained weights and saved jobs state all fields.
        if isinstance(values, Mapping) and values and "depths" not in values:
            given = min(values)
            raise ValueError(f"{given} has no effect without depths; set depths to 1 or more, or remove {given}")
        return values

    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, in the order of the depths."""
        return (TERM,) if self.depths == 1 else tuple(f"{TERM}_{depth}" for depth in range(1, self.depths + 1))
