"""Config of gpt-oss, whose published sizes are in :mod:`d9d_gpt_oss.presets`. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from d9d_moe.balancing.config import Balancing
from d9d_nn.decoder.config import AlternatingConfig
from d9d_nn.decoder.presets import TINY, Presets
from d9d_nn.rope.scaling import YarnScaling
from pydantic import Field, ValidationInfo, field_validator

from d9d_gpt_oss.presets import PRESETS


class GptOssConfig(AlternatingConfig):
    """gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2)."""

    presets: ClassVar[Presets] = PRESETS
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"balancing", "capacity"})

    name: Literal["gpt_oss"] = "gpt_oss"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 20b or 120b. Fills every field that is not given."""

    rope_theta: float = Field(default=150_000.0, gt=1, allow_inf_nan=False)
    """Base of the frequencies of rotary positions."""

    local_rope_theta: None = None
    """Always null: layers with a sliding window have the same rotary positions as the other layers."""

    sliding_window: int = Field(default=128, gt=0)
    """Number of positions that a token of a sliding layer attends to, including its own."""

    attention_bias: bool = True
    """Biases in the four projections of attention."""

    rms_norm_eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    """Constant added to the mean square in every norm."""

    intermediate_size: int = Field(gt=0)
    """Features inside an expert, which its gate and up projections compute."""

    num_experts: int = Field(gt=0)
    """Number of experts in a layer. Hugging Face: ``num_local_experts``."""

    experts_per_token: int = Field(gt=0)
    """Number of experts that compute a token."""

    swiglu_alpha: float = Field(default=1.702, gt=0, allow_inf_nan=False)
    """Factor inside the sigmoid of the experts' gate."""

    swiglu_limit: float = Field(default=7.0, gt=0, allow_inf_nan=False)
    """Upper bound of the gate, and bound of the absolute value of the features that the gate multiplies."""

    balancing: tuple[Balancing, ...] = ()
    """Load-balancing losses, at most one of each kind: auxiliary_loss, z_loss."""

    capacity: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest number of a microbatch's rows for one expert, as a multiple of the mean over all experts; further rows
    are dropped. Null: no limit."""

    @field_validator("experts_per_token")
    @classmethod
    def _so_many_experts(cls, value: int, info: ValidationInfo) -> int:
        experts = info.data.get("num_experts")
        if experts is not None and value > experts:
            raise ValueError(f"{value} is more than num_experts = {experts}; give at most {experts}")
        return value

    @field_validator("balancing")
    @classmethod
    def _losses_only(cls, value: tuple[Balancing, ...]) -> tuple[Balancing, ...]:
        names = [balancing.name for balancing in value]
        if "bias_update" in names:
            raise ValueError(
                "bias_update adds a selection bias, which files of gpt_oss cannot hold; use auxiliary_loss instead"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} appears twice; keep one")
        return value

    def feed_forward_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of matrix elements that one token uses: of its experts and of the router."""
        return self.hidden_size * (3 * self.experts_per_token * self.intermediate_size + self.num_experts)


def tiny() -> GptOssConfig:
    """Config of a model that runs in milliseconds on a CPU."""
    experts = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 24}
    scaling = YarnScaling(factor=8.0, original_max_positions=8, truncate=False)
    return GptOssConfig.model_validate(TINY | experts | {"sliding_window": 4, "rope_scaling": scaling})
