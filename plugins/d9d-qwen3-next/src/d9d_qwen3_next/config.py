"""Configs of Qwen3-Next and Qwen3.5, whose published sizes are in :mod:`d9d_qwen3_next.presets`. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Literal

from d9d_nn.decoder.config import AttentionMask, MultiTokenConfig
from d9d_nn.decoder.multi_token_config import MultiTokenPrediction
from d9d_nn.decoder.presets import Presets
from d9d_nn.rope.scaling import Rope
from d9d_qwen3.moe_config import Qwen3MoeConfig
from pydantic import Field, ValidationInfo, field_validator

from d9d_qwen3_next.presets import DENSE, MOE, NEXT, TINY_EXPERTS, TINY_HYBRID

#: Kind of a layer, as transformers calls it: Gated DeltaNet, or attention to all earlier positions.
LayerType = Literal["linear_attention", "full_attention"]
#: FLOPs of a position for each element of a state, forward and backward: three products of a vector with the state in
#: the forward and two more for each of them in the backward, each with two operations per element.
_STATE_FLOPS = 3 * 3 * 2


class HybridConfig(MultiTokenConfig):
    """Base config of decoders whose layers have Gated DeltaNet or gated attention (Qwen team 2025, "Qwen3-Next")."""

    sliding_window: None = None
    """Null: attention reads all earlier positions."""

    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1, validate_default=True)
    """Fraction of an attention head's features that rotate: its first features, whose number must be even."""

    linear_num_key_heads: int = Field(default=16, gt=0)
    """Number of query heads, and of key heads, of Gated DeltaNet."""

    linear_num_value_heads: int = Field(default=32, gt=0, validate_default=True)
    """Number of value heads of Gated DeltaNet, each with its own state; a multiple of linear_num_key_heads."""

    linear_key_head_dim: int = Field(default=128, gt=0)
    """Features of a query or key head of Gated DeltaNet."""

    linear_value_head_dim: int = Field(default=128, gt=0)
    """Features of a value head of Gated DeltaNet."""

    linear_conv_kernel_dim: int = Field(default=4, ge=2)
    """Number of positions that a short convolution of Gated DeltaNet reads, the current one included."""

    layer_types: tuple[LayerType, ...] = Field(
        default=("linear_attention",) * 3 + ("full_attention",), min_length=1, validate_default=True
    )
    """Kinds of successive layers, repeated until the last layer."""

    @field_validator("partial_rotary_factor")
    @classmethod
    def _rotates_pairs(cls, value: float, info: ValidationInfo) -> float:
        features = info.data.get("head_dim")
        if features is not None and (int(features * value) % 2 or int(features * value) == 0):
            raise ValueError(
                f"{value:g} of head_dim = {features} are {int(features * value)} rotated features; choose a fraction "
                "that gives an even number, at least 2"
            )
        return value

    @field_validator("linear_num_value_heads")
    @classmethod
    def _shares_key_heads(cls, value: int, info: ValidationInfo) -> int:
        keys = info.data.get("linear_num_key_heads")
        if keys is not None and value % keys:
            raise ValueError(f"{value} is no multiple of linear_num_key_heads = {keys}; choose a multiple")
        return value

    @field_validator("layer_types")
    @classmethod
    def _shortest_pattern(cls, value: tuple[LayerType, ...], info: ValidationInfo) -> tuple[LayerType, ...]:
        """Shortest pattern that gives the same layers, so that equal models have equal configs."""
        layers = info.data.get("num_layers", len(value))
        types = tuple(value[layer % len(value)] for layer in range(layers))
        periods = (size for size in range(1, layers) if types[size:] == types[:-size])
        return types[: next(periods, layers)]

    @field_validator("mtp")
    @classmethod
    def _as_in_files(cls, value: MultiTokenPrediction) -> MultiTokenPrediction:
        if value.depths > 1:
            raise ValueError(
                f"files of this family hold one layer for further tokens, not {value.depths}; set depths to 1"
            )
        if value.first == "hidden":
            raise ValueError("files of this family have the embedding first; remove 'first'")
        return value

    @field_validator("attention_mask")
    @classmethod
    def _reads_in_order(cls, value: AttentionMask) -> AttentionMask:
        if value != "causal":
            raise ValueError(
                f"{value} has no meaning in Gated DeltaNet, which reads positions in order; choose causal, or a model "
                "of attention layers only, such as qwen3"
            )
        return value

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has Gated DeltaNet instead of attention; layers of multi-token prediction have attention."""
        return layer < self.num_layers and self.layer_types[layer % len(self.layer_types)] == "linear_attention"

    def rope(self, layer: int) -> Rope:
        """Settings of the rotary positions of this layer."""
        return super().rope(layer)._replace(features=int(self.head_dim * self.partial_rotary_factor))

    def kind(self, layer: int) -> Hashable:
        """Key that is equal for layers of the same structure."""
        return self.is_recurrent(layer), super().kind(layer)

    @property
    def key_features(self) -> int:
        """Number of features of all key heads of Gated DeltaNet together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_features(self) -> int:
        """Number of features of all value heads of Gated DeltaNet together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def mixer_parameters(self, layer: int) -> int:
        """Number of matrix elements that one token uses in Gated DeltaNet, or in attention with its gate."""
        if not self.is_recurrent(layer):
            return super().mixer_parameters(layer) + self.hidden_size * self.num_attention_heads * self.head_dim
        keys, values = self.key_features, self.linear_value_features
        return self.hidden_size * (2 * keys + 3 * values + 2 * self.linear_num_value_heads)

    def mixing_flops(self, layer: int, sequence_length: int) -> float:
        """FLOPs per token, forward and backward, of attention scores and values, or of the states of Gated DeltaNet."""
        if self.is_recurrent(layer):
            return float(_STATE_FLOPS * self.linear_value_features * self.linear_key_head_dim)
        return super().mixing_flops(layer, sequence_length)


class Qwen35Config(HybridConfig):
    """Qwen3.5 dense, text only: Gated DeltaNet and gated attention, then SwiGLU."""

    presets: ClassVar[Presets] = DENSE
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"mtp"})

    name: Literal["qwen3_5"] = "qwen3_5"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 9b or 27b. Fills every field that is not given."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    def feed_forward_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of matrix elements of SwiGLU, in its three matrices."""
        return 3 * self.hidden_size * self.intermediate_size


class Qwen3NextConfig(HybridConfig, Qwen3MoeConfig):
    """Qwen3-Next: Gated DeltaNet and gated attention, then experts and an expert that all tokens share."""

    presets: ClassVar[Presets] = NEXT
    free_on_resume: ClassVar[frozenset[str]] = Qwen3MoeConfig.free_on_resume | {"mtp"}

    name: Literal["qwen3_next"] = "qwen3_next"  # type: ignore[assignment]
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 80b-a3b. Fills every field that is not given."""

    shared_expert_intermediate_size: int = Field(gt=0)
    """Features inside the shared expert, whose output is multiplied by a sigmoid gate of each token."""

    def feed_forward_parameters(self, layer: int) -> int:
        """Number of matrix elements that one token uses in its experts, the shared expert, the router and the gate."""
        shared = self.hidden_size * (3 * self.shared_expert_intermediate_size + 1) if self.has_experts(layer) else 0
        return super().feed_forward_parameters(layer) + shared


class Qwen35MoeConfig(Qwen3NextConfig):
    """Qwen3.5 with mixtures of experts, text only: as Qwen3-Next, with experts in all layers."""

    presets: ClassVar[Presets] = MOE

    name: Literal["qwen3_5_moe"] = "qwen3_5_moe"  # type: ignore[assignment]
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 35b-a3b. Fills every field that is not given."""

    renormalise: Literal[True] = True
    """True: the weights of a token's experts are divided by their sum."""

    dense_layers: tuple[()] = ()
    """Empty: all layers have experts."""


#: Config types of models with experts.
Experts = Qwen3NextConfig | Qwen35MoeConfig
#: Config types that the same module classes accept.
AnyConfig = Qwen35Config | Experts


def tiny() -> Qwen3NextConfig:
    """Config of a Qwen3-Next that runs in milliseconds on a CPU."""
    return Qwen3NextConfig.model_validate(TINY_HYBRID | TINY_EXPERTS)


def tiny_dense() -> Qwen35Config:
    """Config of a dense Qwen3.5 that runs in milliseconds on a CPU."""
    return Qwen35Config.model_validate(TINY_HYBRID | {"intermediate_size": 48})


def tiny_moe() -> Qwen35MoeConfig:
    """Config of a Qwen3.5 with experts that runs in milliseconds on a CPU."""
    return Qwen35MoeConfig.model_validate(TINY_HYBRID | TINY_EXPERTS)
