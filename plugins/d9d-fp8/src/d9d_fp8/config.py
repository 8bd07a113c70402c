"""Config of the strategy ``fp8``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import field_validator


class Fp8Config(PluginConfig):
    """Linear layers with products in float8; scales are computed from the current values (dynamic scaling)."""

    name: Literal["fp8"] = "fp8"
    """Selects the plugin."""
    recipe: Literal["rowwise", "rowwise_gw_hp", "tensorwise", "blockwise"] = "rowwise"
    """Values that share a scale. ``rowwise``: each row of an operand. ``rowwise_gw_hp``: each row, but the whole weight
    in the product for the input's gradient; weight gradients are computed in the job's own dtype. ``tensorwise``: a
    whole operand; gradients are e5m2. ``blockwise``: 128 values of a row of activations and gradients, 128 x 128
    values of a weight."""
    modules: tuple[str, ...] | None = None
    """Patterns for names of linear layers, matched against the full name or its last part, such as ``*.mlp.*`` or
    ``q_proj``. By default, the linear layers of all blocks, if their numbers of features are multiples of 16, or of 128
    for ``blockwise``."""
    emulate: bool = False
    """Round operands to float8 but multiply in float32: slow, on any device."""

    @field_validator("modules")
    @classmethod
    def _at_least_one(cls, modules: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if modules is not None and not modules:
            raise ValueError("'modules' needs at least one pattern; omit it to convert the linear layers of all blocks")
        return modules
