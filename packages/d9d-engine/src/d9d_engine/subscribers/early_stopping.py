"""Subscriber ``early_stopping``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from d9d_core.events import ValuesLogged
from d9d_core.types import State

from d9d_engine.subscribers.config import EarlyStoppingConfig


class EarlyStopping:
    """Ends the run once a series has not improved for several consecutive values.

    Non-finite values never count as an improvement. Logged values are equal on all ranks, so all ranks end after the
    same step. The count is saved in checkpoints; with another series or mode it starts at zero.

    Args:
        config: series and patience.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self._best: float | None = None
        self._since = 0

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscription to logged values."""
        return [(ValuesLogged, self._logged)]

    @property
    def reason_to_end(self) -> str | None:
        """Reason to end the run; ``None`` while the patience lasts."""
        config = self.config
        if self._since < config.patience:
            return None
        best = "it was never finite" if self._best is None else f"the best was {self._best:.6g}"
        return f"{config.series} has not improved in {self._since} values ({best})"

    def state(self) -> State:
        """Series, mode, best value, and number of values since then."""
        return {"series": self.config.series, "mode": self.config.mode, "best": self._best, "since": self._since}

    def load_state(self, state: State) -> None:
        """Restore best value and count if series and mode are unchanged; ``patience`` and ``min_delta`` may differ."""
        best, since = state.get("best"), state.get("since")
        same = (state.get("series"), state.get("mode")) == (self.config.series, self.config.mode)
        if same and (best is None or isinstance(best, float)) and isinstance(since, int):
            self._best, self._since = best, since

    def _logged(self, event: ValuesLogged) -> None:
        value = event.values.get(self.config.series)
        if value is None:
            return
        if self._is_better(value):
            self._best, self._since = value, 0
        else:
            self._since += 1

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.config.mode == "min" else value - self._best
        return gain > self.config.min_delta
