"""Config of the strategy ``compile``."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig
from pydantic import model_validator


class CompileConfig(PluginConfig):
    """Compilation of each block; the fields are those of ``torch.compile``."""

    name: Literal["compile"] = "compile"
    """Selects the plugin."""
    backend: str = "inductor"
    """Compiler behind Dynamo; ``aot_eager`` and ``eager`` help to find out which part of a problem is whose."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """What inductor optimises for."""
    fullgraph: bool = False
    """Make it an error if a block cannot be compiled as one graph."""
    dynamic: bool | None = None
    """Compile for any shape (true), for each shape anew (false), or generalise at the second shape (absent)."""

    @model_validator(mode="after")
    def _modes_are_inductors(self) -> CompileConfig:
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode belongs to backend 'inductor', not to '{self.backend}'; remove one of them")
        return self
