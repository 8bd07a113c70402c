"""Config of the fine-tuning method ``ia3``."""

from __future__ import annotations

from typing import Any, Literal, Self

from d9d_core.config import PathOrAddress, PluginConfig
from pydantic import field_validator, model_validator


class Ia3Config(PluginConfig):
    """Learned scales of activations (Liu et al. 2022, "(IA)^3", section 3.3)."""

    name: Literal["ia3"] = "ia3"
    """Selects the plugin."""
    targets: tuple[str, ...] = ("k_proj", "v_proj")
    """Linear layers whose outputs are scaled: last parts of names, or patterns of whole names
    (``layers.1?.attention.k_proj``)."""
    feedforward: tuple[str, ...] = ("down_proj",)
    """Linear layers whose inputs are scaled, written like ``targets``; in the paper, the last layer of a feed-forward
    block."""
    init_from: PathOrAddress | None = None
    """Adapter to start from: a directory in the format of the ``peft`` library, or an fsspec address of one."""

    @field_validator("targets", "feedforward", mode="before")
    @classmethod
    def _one_may_stand_alone(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _something_is_wanted(self) -> Self:
        if not self.targets and not self.feedforward:
            raise ValueError("targets and feedforward are empty; name layers in one of them, such as [k_proj, v_proj]")
        return self
