"""Config of the strategy ``fp8``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import field_validator


class Fp8Config(PluginConfig):
    """Products of linear layers in float8, with scales that are computed from the values each time."""

    name: Literal["fp8"] = "fp8"
    """Selects the plugin."""
    recipe: Literal["rowwise", "rowwise_gw_hp", "tensorwise", "blockwise"] = "rowwise"
    """Parts that share a scale: ``rowwise`` each row of an operand; ``rowwise_gw_hp`` the same, but weight gradients in
    the job's own format; ``tensorwise`` all of an operand, with gradients in e5m2; ``blockwise`` 128 values of a row of
    activations and gradients, 128 x 128 of a weight."""
    modules: tuple[str, ...] | None = None
    """Patterns over names of linear layers, whole or their last part, such as ``*.mlp.*`` or ``q_proj``. By default,
    all linear layers of blocks whose sizes the recipe can divide."""
    emulate: bool = False
    """Round operands to float8 and multiply in float32: on any device, and slowly."""

    @field_validator("modules")
    @classmethod
    def _at_least_one(cls, modules: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if modules is not None and not modules:
            raise ValueError("needs at least one pattern; leave it out to take the linear layers of blocks")
        return modules
