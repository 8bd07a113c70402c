"""Pipeline stages as model plugins are asked to build them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a model to build: number ``index`` of ``count``.

    Attributes:
        layers: how many layers each stage has, if the job says so; ``None`` leaves it to the model.
    """

    index: int = 0
    count: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage receives tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the head."""
        return self.index == self.count - 1
