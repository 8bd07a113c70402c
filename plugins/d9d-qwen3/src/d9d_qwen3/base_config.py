"""Shared config fields of dense and MoE models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_core.config import ModelConfig
from d9d_nn.heads.config import CausalLMHeadConfig, Heads, check_heads
from d9d_nn.initialization import Initialization
from d9d_nn.rope.scaling import RopeScaling
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from d9d_qwen3.presets import Presets, fill, sizes_or_preset


class Qwen3Base(ModelConfig):
    """Base config: fields of attention, embeddings, norms and heads; each model adds its feed-forward layers."""

    model_config = ConfigDict(json_schema_extra=sizes_or_preset)

    presets: ClassVar[Presets] = {}

    preset: str | None = None
    """A published size. Fills every field that is not given."""

    vocab_size: int = Field(gt=0)
    """Number of token ids."""

    added_tokens: int = Field(default=0, ge=0)
    """How many of the last token ids have weights of their own, so that they can be trained alone."""

    hidden_size: int = Field(gt=0)
    """Features of a token between layers."""

    num_layers: int = Field(gt=0, le=1024)
    """Number of decoder layers."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of a layer."""

    num_key_value_heads: int = Field(gt=0)
    """Key and value heads of a layer; divides the number of query heads."""

    head_dim: int = Field(default=0, ge=0, validate_default=True)
    """Features of a head, an even number; 0 takes hidden_size / num_attention_heads."""

    rope_theta: float = Field(default=1_000_000.0, gt=1, allow_inf_nan=False)
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched beyond the lengths of pretraining; null for not at all."""

    sliding_window: int | None = Field(default=None, gt=0)
    """How many positions a token of a sliding layer sees, its own included; null if all layers see all."""

    attention_bias: bool = False
    """Biases in the four projections of attention."""

    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the mean square in every norm."""

    tie_embeddings: bool = False
    """Use the embedding's weight as that of the causal_lm head."""

    max_positions: int = Field(default=32768, gt=0)
    """Longest sequence the model is meant for."""

    initialization: Initialization = Initialization()
    """How the weights start."""

    heads: Heads = {"causal_lm": CausalLMHeadConfig()}
    """Heads on the hidden states, by name: of kind causal_lm, classification,
    token_classification or embedding."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, value: Any) -> Any:
        return fill(value, cls.presets) if isinstance(value, Mapping) else value

    @field_validator("added_tokens")
    @classmethod
    def _leaves_regular_tokens(cls, value: int, info: ValidationInfo) -> int:
        words = info.data.get("vocab_size")
        if words is not None and value >= words:
            raise ValueError(f"{value} of vocab_size = {words} token ids leave no regular one; add fewer")
        return value

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

    @field_validator("heads")
    @classmethod
    def _heads_fit(cls, value: Heads, info: ValidationInfo) -> Heads:
        hidden, layers, tied = (info.data.get(name) for name in ("hidden_size", "num_layers", "tie_embeddings"))
        check_heads(value, hidden_size=hidden, num_layers=layers, tied=tied)
        return value

    def window(self, layer: int) -> int | None:  # noqa: ARG002 - some models have layers of two kinds
        """Number of positions that a token of this layer sees; ``None`` for all."""
        return self.sliding_window
