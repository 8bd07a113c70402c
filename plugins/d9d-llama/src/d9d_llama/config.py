"""Configs and costs of Llama, Mistral, Qwen2 and GLM; published sizes are in :mod:`d9d_llama.presets`.

Imports no torch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from d9d_core.cost import Share, StageCost
from d9d_core.model import Stage
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.costs import dense_cost
from d9d_nn.decoder.presets import TINY, Presets
from d9d_nn.rope.scaling import Rope
from pydantic import Field, ValidationInfo, field_validator

from d9d_llama.presets import GLM, LLAMA, MISTRAL, QWEN2


class LlamaConfig(DenseConfig):
    """Llama 3 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.2)."""

    presets: ClassVar[Presets] = LLAMA

    name: Literal["llama"] = "llama"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 1b, 3b, 8b, 70b or 405b. Fills every field that is not given."""

    sliding_window: None = None
    """Null: all layers attend to all positions. For a window, use mistral."""


class MistralConfig(DenseConfig):
    """Mistral (Jiang et al. 2023, "Mistral 7B"): Llama with an optional sliding window in all layers."""

    presets: ClassVar[Presets] = MISTRAL

    name: Literal["mistral"] = "mistral"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 7b or 7b-v0.1. Fills every field that is not given."""

    attention_bias: Literal[False] = False
    """False: no projection has a bias. For biases, use llama."""

    sliding_from_layer: Literal[0] = 0
    """0: if there is a window, all layers use it."""


class Qwen2Config(DenseConfig):
    """Qwen2 and Qwen2.5 (Qwen team 2024, "Qwen2.5 Technical Report"): biases of queries, keys and values."""

    presets: ClassVar[Presets] = QWEN2

    name: Literal["qwen2"] = "qwen2"
    """Selects the plugin."""

    preset: str | None = None
    """A published size of Qwen2.5: 0.5b, 1.5b, 3b, 7b, 14b, 32b or 72b. Fills every field that is not given."""

    attention_bias: Literal[True] = True
    """True: the query, key and value projections have biases."""

    def biased_projections(self) -> frozenset[str]:
        """Names of the attention projections that have a bias."""
        return frozenset({"q_proj", "k_proj", "v_proj"})


class GlmConfig(DenseConfig):
    """GLM-4 (GLM team 2024, "ChatGLM: A Family of Large Language Models"): RoPE rotates only a part of each head.

    Two neighbouring features form a pair that rotates.
    """

    presets: ClassVar[Presets] = GLM

    name: Literal["glm"] = "glm"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 4-9b. Fills every field that is not given."""

    sliding_window: None = None
    """Null: all layers attend to all positions."""

    attention_bias: bool = True
    """Biases in the query, key and value projections."""

    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1, validate_default=True)
    """Fraction of a head's features that rotate: its first features, whose number must be even."""

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

    def rope(self, layer: int) -> Rope:
        """Settings of the rotary positions of this layer."""
        return super().rope(layer)._replace(features=int(self.head_dim * self.partial_rotary_factor))

    def biased_projections(self) -> frozenset[str]:
        """Names of the attention projections that have a bias."""
        return frozenset({"q_proj", "k_proj", "v_proj"}) if self.attention_bias else frozenset()


def stage_cost(config: DenseConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a Llama, Mistral, Qwen2 or GLM model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    return dense_cost(config, stage, share, head_norms=False)


_TINY = TINY | {"intermediate_size": 48}


def tiny_llama() -> LlamaConfig:
    """Config of a Llama that runs in milliseconds on a CPU."""
    return LlamaConfig.model_validate(_TINY)


def tiny_mistral() -> MistralConfig:
    """Config of a Mistral that runs in milliseconds on a CPU, with a window."""
    return MistralConfig.model_validate(_TINY | {"sliding_window": 4})


def tiny_qwen2() -> Qwen2Config:
    """Config of a Qwen2 that runs in milliseconds on a CPU."""
    return Qwen2Config.model_validate(_TINY)


def tiny_glm() -> GlmConfig:
    """Config of a GLM that runs in milliseconds on a CPU."""
    return GlmConfig.model_validate(_TINY)
