"""Config of a decoder: fields of attention, embeddings, norms and heads; of dense ones, of feed-forward layers too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from d9d_core.config import ModelConfig
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from d9d_nn.decoder.presets import Presets, fill, sizes_or_preset
from d9d_nn.heads.config import CausalLMHeadConfig, Heads, check_heads
from d9d_nn.initialization import Initialization
from d9d_nn.rope.scaling import RopeScaling

#: Projections of attention, all of which may have biases.
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


class DecoderConfig(ModelConfig, ABC):
    """Base config of a decoder: fields of attention, embeddings, norms and heads; families add feed-forward layers."""

    model_config = ConfigDict(json_schema_extra=sizes_or_preset)

    presets: ClassVar[Presets] = {}

    preset: str | None = None
    """A published size. Fills every field that is not given."""

    vocab_size: int = Field(gt=0)
    """Number of token ids."""

    added_tokens: int = Field(default=0, ge=0)
    """Number of the last token ids that have weights of their own, so that these can be trained alone."""

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

    @abstractmethod
    def feed_forward_parameters(self, layer: int) -> int:
        """Number of weights of matrices that one token uses in the feed-forward part of this layer."""

    def window(self, layer: int) -> int | None:  # noqa: ARG002 - some models have layers of two kinds
        """Number of positions that a token of this layer sees; ``None`` for all."""
        return self.sliding_window

    def kind(self, layer: int) -> Hashable:
        """Key that is equal for layers that are built alike."""
        return self.window(layer)

    def biased_projections(self) -> frozenset[str]:
        """Names of the projections of attention that have a bias."""
        return PROJECTIONS if self.attention_bias else frozenset()


class DenseConfig(DecoderConfig):
    """Base config of a dense decoder: one SwiGLU in each layer, and a window in all layers or the later ones."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    sliding_from_layer: int = Field(default=0, ge=0)
    """The first layer that slides; earlier ones see all. Hugging Face: ``max_window_layers``."""

    @field_validator("sliding_from_layer")
    @classmethod
    def _some_layer_slides(cls, value: int, info: ValidationInfo) -> int:
        layers, given = info.data.get("num_layers"), "sliding_window" in info.data
        if given and info.data["sliding_window"] is None and value:
            raise ValueError(f"{value} has no effect without sliding_window; give a window, or remove this field")
        if layers is not None and value >= layers:
            raise ValueError(f"{value} leaves no layer of {layers} that slides; remove sliding_window and this field")
        return value

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer sees; ``None`` for all."""
        return self.sliding_window if layer >= self.sliding_from_layer else None

    def feed_forward_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of weights of the three matrices of SwiGLU."""
        return 3 * self.hidden_size * self.intermediate_size
