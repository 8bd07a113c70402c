"""Config and costs of Gemma, whose published sizes are in :mod:`d9d_gemma.presets`. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from d9d_core.cost import Share, StageCost
from d9d_core.model import Stage
from d9d_nn.decoder.config import AlternatingConfig
from d9d_nn.decoder.costs import dense_cost
from d9d_nn.decoder.presets import TINY, Presets
from d9d_nn.rope.scaling import LinearScaling, Rope
from pydantic import Field, ValidationInfo, field_validator

from d9d_gemma.presets import PRESETS


class GemmaConfig(AlternatingConfig):
    """Gemma 2 (Gemma team 2024, "Gemma 2", section 2) and 3 (Gemma team 2025, "Gemma 3", section 2), text only."""

    presets: ClassVar[Presets] = PRESETS

    name: Literal["gemma"] = "gemma"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 2-2b, 2-9b, 2-27b, 3-270m, 3-1b, 3-4b, 3-12b or 3-27b. Fills every field that is not given."""

    query_pre_attn_scalar: int = Field(default=0, ge=0, validate_default=True)
    """Attention scores are divided by the square root of this number; 0 takes head_dim."""

    score_softcap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Soft cap c of attention scores, ``c * tanh(score / c)``, only in generation 2; null for none."""

    logit_softcap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Soft cap c of logits, ``c * tanh(logit / c)``; null for none."""

    generation: Literal[2, 3] = Field(default=3, validate_default=True)
    """Generation of Gemma: 2 may cap attention scores, 3 normalises query and key heads. Hugging Face: ``gemma2``,
    ``gemma3_text``."""

    tie_embeddings: bool = True
    """Use the embedding's weight for the causal_lm head."""

    @field_validator("query_pre_attn_scalar")
    @classmethod
    def _as_head_dim(cls, value: int, info: ValidationInfo) -> int:
        return value or info.data.get("head_dim", 0)

    @field_validator("generation")
    @classmethod
    def _has_its_parts(cls, value: Literal[2, 3], info: ValidationInfo) -> Literal[2, 3]:
        if info.data.get(other := {2: "local_rope_theta", 3: "score_softcap"}[value]) is not None:
            raise ValueError(f"{value} has no {other}; remove {other}, or set generation to {5 - value}")
        return value

    def rope(self, layer: int) -> Rope:
        """Settings of the rotary positions of this layer."""
        # Attention divides scores by sqrt(head_dim) instead of sqrt(query_pre_attn_scalar). Cosines and sines, which
        # multiply queries and keys, contain the fourth root of the ratio, so no extra pass over queries is needed.
        return super().rope(layer)._replace(magnitude=(self.head_dim / self.query_pre_attn_scalar) ** 0.25)


def stage_cost(config: GemmaConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a Gemma model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    return dense_cost(config, stage, share, head_norms=config.generation == 3, output_norms=True)


_TINY = TINY | {"intermediate_size": 48, "sliding_window": 4, "query_pre_attn_scalar": 24, "logit_softcap": 3.0}


def tiny(generation: Literal[2, 3] = 3) -> GemmaConfig:
    """Config of a model that runs in milliseconds on a CPU."""
    second = {"rope_theta": 1e4, "score_softcap": 2.0}
    own = second if generation == 2 else {"rope_scaling": LinearScaling(factor=8.0), "local_rope_theta": 1e4}
    return GemmaConfig.model_validate({**_TINY, **own, "generation": generation})
