"""Config of the metric ``token_accuracy``."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Literal

from d9d_core.extend import PluginConfig
from pydantic import Field, PositiveInt


class TokenAccuracyConfig(PluginConfig):
    """Metric: share of the targets that are among the most probable words."""

    name: Literal["token_accuracy"] = "token_accuracy"
    """Selects the plugin."""
    top: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 5)
    """Numbers of most probable words; a series each."""
    ranks: str = "token_ranks"
    """Observation of the targets' ranks: int64, 0 for the most probable word, negative where nothing is predicted."""

    @property
    def reads(self) -> Set[str]:
        """Observation that is read."""
        return {self.ranks}
