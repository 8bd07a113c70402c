"""Config section ``initialization``: initial weights of a language model."""

from __future__ import annotations

import math

from d9d_core.config import Section
from pydantic import Field


class Initialization(Section):
    """Initial weights: normal, but one in norms; depth scaling as in GPT-2 (Radford et al. 2019, section 2.3)."""

    std: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Standard deviation of the weights of embeddings and projections."""

    depth_scaled: bool = True
    """Divide the standard deviation of projections that write to the residual stream by sqrt(2 x layers)."""

    def output_std(self, layers: int) -> float:
        """Standard deviation of projections that write to the residual stream of a model of ``layers`` layers."""
        return self.std / math.sqrt(2 * layers) if self.depth_scaled else self.std
