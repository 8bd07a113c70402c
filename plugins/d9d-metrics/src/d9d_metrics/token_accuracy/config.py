"""Config of the metric ``token_accuracy``."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import PositiveInt, field_validator


class TokenAccuracyConfig(PluginConfig):
    """Metric: fraction of the targets that are among the most probable tokens."""

    name: Literal["token_accuracy"] = "token_accuracy"
    """Selects the plugin."""
    top: tuple[PositiveInt, ...] = (1, 5)
    """Numbers k of most probable tokens; each has its own series."""
    ranks: str = "token_ranks"
    """Observation with the rank of each target among all tokens, int64: 0 if it is the most probable token, negative
    where there is no target."""

    @field_validator("top")
    @classmethod
    def _something_is_computed(cls, top: tuple[int, ...]) -> tuple[int, ...]:
        if not top:
            raise ValueError("the list is empty; give at least one number, such as [1, 5]")
        if len(set(top)) != len(top):
            raise ValueError("a number is duplicate; give each once")
        return top

    @property
    def reads(self) -> Set[str]:
        """Name of the observation to read."""
        return {self.ranks}
