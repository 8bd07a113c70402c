"""Config of the strategy ``activation_checkpointing``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import Field, field_validator


class ActivationCheckpointingConfig(PluginConfig):
    """Activation checkpointing of blocks, which the backward computes again. By default all of them."""

    name: Literal["activation_checkpointing"] = "activation_checkpointing"
    """Selects the plugin."""
    match: tuple[str, ...] = ("*",)
    """Patterns over qualified block names, such as ``layers.1?``; ``*`` is any text, ``?`` one character."""
    every: int = Field(default=1, ge=1)
    """Of the matched blocks, take the first and each ``every``-th after it; 2 takes half of them."""
    save: tuple[str, ...] = ()
    """Ops whose outputs are kept all the same, such as ``attention``, whatever kernel computes it; or patterns over
    torch's operators, such as ``aten.mm``. More memory, less to compute again."""
    preserve_rng_state: bool = True
    """Repeat the random numbers of the forward. Only blocks without any randomness (dropout) may turn it off."""

    @field_validator("match")
    @classmethod
    def _at_least_one(cls, match: tuple[str, ...]) -> tuple[str, ...]:
        if not match:
            raise ValueError("needs at least one pattern; leave it out to take all blocks")
        return match
