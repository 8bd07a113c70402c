"""Config of a Qwen3 model with mixtures of experts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

from d9d_moe.balancing.config import Balancers, BiasUpdateConfig
from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.presets import TINY, Presets
from pydantic import Field, ValidationInfo, field_validator

from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.presets import MOE_PRESETS

ExpertFiles = Literal["per_expert", "fused"]


class Qwen3MoeConfig(DecoderConfig):
    """Qwen3 with mixtures of experts (Qwen team 2025, "Qwen3 Technical Report", section 2)."""

    presets: ClassVar[Presets] = MOE_PRESETS
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"balancing", "capacity", "expert_files"})

    name: Literal["qwen3_moe"] = "qwen3_moe"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 30b-a3b or 235b-a22b. Fills every field that is not given."""

    num_experts: int = Field(gt=0)
    """Number of experts in a layer."""

    experts_per_token: int = Field(gt=0)
    """Number of experts that compute a token."""

    moe_intermediate_size: int = Field(gt=0)
    """Features inside an expert, which its gate and up projections compute."""

    renormalise: bool = True
    """Divide the weights of a token's experts by their sum. Hugging Face: ``norm_topk_prob``."""

    dense_layers: tuple[int, ...] = ()
    """Indices of layers with one feed-forward layer instead of experts. Hugging Face: ``mlp_only_layers``."""

    intermediate_size: int = Field(default=0, ge=0, validate_default=True)
    """Features inside the feed-forward layer of dense layers; 0: as many as a token's experts have together."""

    balancing: Balancers = ()
    """Load-balancing methods, at most one of each kind: auxiliary_loss, z_loss, bias_update."""

    capacity: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest number of a microbatch's rows for one expert, as a multiple of the mean over all experts; further rows
    are dropped. Null: no limit."""

    expert_files: ExpertFiles = "per_expert"
    """Layout of experts in exported files: ``per_expert``, a tensor for each matrix of each expert, as published; or
    ``fused``, two tensors per layer, as transformers holds them in memory. Both can be read."""

    @field_validator("experts_per_token")
    @classmethod
    def _so_many_experts(cls, value: int, info: ValidationInfo) -> int:
        experts = info.data.get("num_experts")
        if experts is not None and value > experts:
            raise ValueError(f"{value} is more than num_experts = {experts}; give at most {experts}")
        return value

    @field_validator("dense_layers")
    @classmethod
    def _some_layer_has_experts(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        layers, found = info.data.get("num_layers"), tuple(sorted(value))
        if twice := [layer for layer, after in pairwise(found) if layer == after]:
            raise ValueError(f"layer {twice[0]} appears twice; name each layer once")
        if layers is None:
            return found
        if outside := [layer for layer in found if not 0 <= layer < layers]:
            raise ValueError(f"there is no layer {outside[0]} in a model of {layers} layers; give 0 to {layers - 1}")
        if len(found) == layers:
            raise ValueError(f"all {layers} layers are dense, none has experts; use the model qwen3")
        return found

    @field_validator("intermediate_size")
    @classmethod
    def _as_active_experts(cls, value: int, info: ValidationInfo) -> int:
        chosen, inside = (info.data.get(name) for name in ("experts_per_token", "moe_intermediate_size"))
        return value if value or chosen is None or inside is None else chosen * inside

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers

    def feed_forward_parameters(self, layer: int) -> int:
        """Number of weights that one token uses: its experts and the router, or the SwiGLU of a dense layer."""
        if not self.has_experts(layer):
            return 3 * self.hidden_size * self.intermediate_size
        return self.hidden_size * (3 * self.experts_per_token * self.moe_intermediate_size + self.num_experts)

    def kind(self, layer: int) -> Hashable:
        """Key that is equal for layers of the same structure."""
        return self.window(layer), self.has_experts(layer)

    @property
    def has_selection_bias(self) -> bool:
        """Whether each router has a selection bias, which ``bias_update`` changes."""
        return any(isinstance(balancing, BiasUpdateConfig) for balancing in self.balancing)

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Check that both the checkpoint and this config have selection biases, or neither.

        Raises:
            ValueError: only the checkpoint, or only this config, has selection biases.
        """
        had = any(balancing["name"] == "bias_update" for balancing in saved.get("balancing", ()))
        if had and not self.has_selection_bias:
            raise ValueError(
                "balancing: the checkpoint has a selection_bias in each router, which this model lacks; "
                "keep bias_update, or use another run.name"
            )
        if self.has_selection_bias and not had:
            raise ValueError(
                "balancing: the checkpoint lacks the selection_bias that bias_update updates; "
                "remove bias_update, or use another run.name"
            )


#: Config types that the same module classes accept.
AnyQwen3Config = Qwen3Config | Qwen3MoeConfig


def tiny() -> Qwen3MoeConfig:
    """Config of a model that runs in milliseconds on a CPU, with experts in all layers and an untied head."""
    experts = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24}
    return Qwen3MoeConfig.model_validate(TINY | experts)
