"""The config of a Qwen3 dense model."""

from __future__ import annotations

from typing import Literal

from d9d_core.config.base import PluginConfig
from d9d_nn.initialization import Initialization
from pydantic import Field, ValidationInfo, field_validator


class Qwen3Config(PluginConfig):
    """Qwen3 dense (Qwen team 2025, "Qwen3 Technical Report", section 2)."""

    name: Literal["qwen3"] = "qwen3"
    """Selects the plugin."""

    vocab_size: int = Field(gt=0)
    """Number of token ids."""

    hidden_size: int = Field(gt=0)
    """Features of a token between layers."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    num_layers: int = Field(gt=0)
    """Number of decoder layers."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of a layer."""

    num_key_value_heads: int = Field(gt=0)
    """Key and value heads of a layer; divides the number of query heads."""

    head_dim: int = Field(default=0, ge=0, validate_default=True)
    """Features of a head, an even number; 0 takes hidden_size / num_attention_heads."""

    rope_theta: float = Field(default=1_000_000.0, gt=1, allow_inf_nan=False)
    """Base of the rotary frequencies."""

    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the mean square in every norm."""

    tie_embeddings: bool = False
    """Use the embedding's weight as the head's."""

    max_positions: int = Field(default=32768, gt=0)
    """Longest sequence the model is meant for."""

    initialization: Initialization = Initialization()
    """How the weights start."""

    @field_validator("num_key_value_heads")
    @classmethod
    def _divides_query_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads")
        if heads is not None and heads % value:
            raise ValueError(f"{value} does not divide num_attention_heads = {heads}; heads are shared evenly")
        return value

    @field_validator("head_dim")
    @classmethod
    def _fill_head_dim(cls, value: int, info: ValidationInfo) -> int:
        hidden, heads = info.data.get("hidden_size"), info.data.get("num_attention_heads")
        if value == 0 and hidden is not None and heads is not None:
            value, rest = divmod(hidden, heads)
            if rest:
                raise ValueError(
                    f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}; give head_dim"
                )
        if value % 2:
            raise ValueError(f"{value} is odd, but positions rotate pairs of features; choose an even head_dim")
        return value


def tiny() -> Qwen3Config:
    """A model that runs in milliseconds on a CPU, with every feature that has a choice: grouped heads, untied head."""
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_positions=64,
    )
