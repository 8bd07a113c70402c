"""The choices of balancing, as models have them in their configs."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config.base import PluginConfig
from pydantic import Field

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AuxiliaryLossConfig(PluginConfig):
    """A loss on uneven use of experts."""

    name: Literal["auxiliary_loss"] = "auxiliary_loss"
    """Selects this balancing."""
    scope: Literal["sequence", "batch"] = "sequence"
    """What is balanced: each sample, or a rank's microbatch as a whole, which depends on how the batch is cut."""
    coefficient: _Positive
    """Factor of the term in the loss; the term is 1 when all experts get the same."""


class ZLossConfig(PluginConfig):
    """A loss on large router logits."""

    name: Literal["z_loss"] = "z_loss"
    """Selects this balancing."""
    coefficient: _Positive = 1e-3
    """Factor of the term in the loss."""


class BiasUpdateConfig(PluginConfig):
    """A bias of the selection that follows the load, without a loss."""

    name: Literal["bias_update"] = "bias_update"
    """Selects this balancing."""
    rate: _Positive = 1e-3
    """How far the bias of an expert moves per optimizer step."""


#: For a field of a model's config: ``balancing: tuple[Balancing, ...] = ()``.
Balancing = Annotated[AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig, Field(discriminator="name")]
