"""Config of the strategy ``compile``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import model_validator

#: Modes of ``torch.compile`` in which inductor records CUDA graphs.
_RECORDING = ("reduce-overhead", "max-autotune")


class CompileConfig(PluginConfig):
    """Compilation of each block; the fields are arguments of ``torch.compile``."""

    name: Literal["compile"] = "compile"
    """Selects the plugin."""
    backend: str = "inductor"
    """Backend of ``torch.compile``; ``aot_eager`` and ``eager`` help to find which part of the compiler fails."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Mode of ``torch.compile``: what inductor optimises for."""
    fullgraph: bool = False
    """Raise an error if a block cannot be compiled as one graph."""
    dynamic: bool | None = None
    """Compile for any shape (true), for each shape separately (false), or first for one shape, and for any shape once
    another one occurs (absent)."""
    cudagraphs: bool = False
    """Record each block's forward and backward as CUDA graphs, so that the host launches one graph instead of many
    kernels; ``reduce-overhead`` and ``max-autotune`` do so too."""

    @property
    def records_graphs(self) -> bool:
        """Whether blocks become CUDA graphs, by the field or by the mode."""
        return self.cudagraphs or self.mode in _RECORDING

    @model_validator(mode="after")
    def _inductor_understands(self) -> CompileConfig:
        for field in ("mode", "cudagraphs"):
            if getattr(self, field) and self.backend != "inductor":
                raise ValueError(f"{field} belongs to backend 'inductor', not to '{self.backend}'; remove one of them")
        if self.cudagraphs and self.mode == "max-autotune-no-cudagraphs":
            raise ValueError("cudagraphs: true contradicts mode 'max-autotune-no-cudagraphs'; write max-autotune")
        return self
