"""Config of the strategy ``activation_checkpointing``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import Field, field_validator


class ActivationCheckpointingConfig(PluginConfig):
    """Activation checkpointing: the backward recomputes the activations of blocks, by default of all blocks."""

    name: Literal["activation_checkpointing"] = "activation_checkpointing"
    """Selects the plugin."""
    match: tuple[str, ...] = ("*",)
    """Patterns of qualified block names, such as ``layers.1?``; ``*`` matches any text, ``?`` one character."""
    every: int = Field(default=1, ge=1)
    """Distance of the checkpointed blocks among the matched blocks, from the first block on; 2 checkpoints every second
    block."""
    save: tuple[str, ...] = ()
    """Ops whose outputs are stored instead of recomputed: ops such as ``attention``, whatever their kernel, or patterns
    of torch operators such as ``aten.mm``. This takes more memory and recomputes less."""
    preserve_rng_state: bool = True
    """Repeat the forward's random numbers in the recomputation. It may be false only if blocks draw none (no
    dropout)."""

    @field_validator("match")
    @classmethod
    def _at_least_one(cls, match: tuple[str, ...]) -> tuple[str, ...]:
        if not match:
            raise ValueError("'match' needs at least one pattern; omit it to checkpoint all blocks")
        return match
