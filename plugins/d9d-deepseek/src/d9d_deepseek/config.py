"""Config of DeepSeek-V3, whose published sizes are in :mod:`d9d_deepseek.presets`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal

from d9d_moe.balancing.config import Balancers
from d9d_nn.decoder.config import MultiTokenConfig
from d9d_nn.decoder.presets import TINY, Presets, fill
from d9d_nn.rope.scaling import Rope
from pydantic import Field, ValidationInfo, field_validator, model_validator

from d9d_deepseek.presets import PRESETS


class DeepSeekConfig(MultiTokenConfig):
    """DeepSeek-V3 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2)."""

    presets: ClassVar[Presets] = PRESETS
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"balancing", "capacity", "mtp"})

    name: Literal["deepseek_v3"] = "deepseek_v3"
    """Selects the plugin."""

    preset: str | None = None
    """A published size: 671b or moonlight-16b-a3b. Fills every field that is not given."""

    num_key_value_heads: int = Field(default=0, ge=0)
    """Number of key and value heads: always num_attention_heads, which is also the meaning of 0."""

    head_dim: int = Field(default=0, ge=0, validate_default=True)
    """Features of a query or key head: always qk_nope_head_dim + qk_rope_head_dim, which is also the meaning of 0."""

    sliding_window: None = None
    """Null: all layers attend to all positions."""

    attention_bias: bool = False
    """Biases in the projections to latents and in the output projection of attention."""

    q_lora_rank: int | None = Field(default=None, gt=0)
    """Features of the latent that queries are computed from; null: one matrix maps the hidden state to queries."""

    kv_lora_rank: int = Field(gt=0)
    """Features of the latent that keys and values are computed from."""

    qk_nope_head_dim: int = Field(gt=0)
    """Features of a query or key head that do not rotate, and so do not depend on positions."""

    qk_rope_head_dim: int = Field(gt=0)
    """Features of a query or key head that rotate, an even number; all key heads share their values."""

    v_head_dim: int = Field(gt=0)
    """Features of a value head, at most head_dim."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward part of dense layers."""

    first_expert_layer: int = Field(default=0, ge=0)
    """First layer with experts; earlier layers are dense. Hugging Face: ``first_k_dense_replace``."""

    num_experts: int = Field(gt=0)
    """Number of routed experts in a layer."""

    experts_per_token: int = Field(gt=0)
    """Number of routed experts that compute a token."""

    moe_intermediate_size: int = Field(gt=0)
    """Features inside an expert."""

    num_shared_experts: int = Field(default=1, gt=0)
    """Number of experts that compute every token: one feed-forward layer with this many times an expert's features."""

    num_groups: int = Field(default=1, gt=0)
    """Number of groups of consecutive experts. Hugging Face: ``n_group``."""

    top_groups: int = Field(default=1, gt=0)
    """Number of groups that a token may use, ranked by the sum of their two best scores. Hugging Face:
    ``topk_group``."""

    renormalise: bool = True
    """Divide the weights of a token's experts by their sum. Hugging Face: ``norm_topk_prob``."""

    routed_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor that multiplies the weights of routed experts. Hugging Face: ``routed_scaling_factor``."""

    balancing: Balancers = ()
    """Load-balancing methods, at most one of each kind: auxiliary_loss, z_loss, bias_update. Only bias_update changes
    the selection bias, which each router has."""

    capacity: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest number of a microbatch's rows for one expert, as a multiple of the mean over all experts; further rows
    are dropped. Null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, value: Any) -> Any:
        """Fill fields from the preset, and the two sizes that follow from other fields."""
        if not isinstance(value, Mapping):
            return value
        filled = fill(value, cls.presets)
        parts = [filled.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        heads, features = filled.get("num_attention_heads"), sum(part for part in parts if isinstance(part, int))
        return {
            **filled,
            "num_key_value_heads": filled.get("num_key_value_heads") or heads or 0,
            "head_dim": filled.get("head_dim") or features,
        }

    @field_validator("num_key_value_heads")
    @classmethod
    def _divides_query_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads")
        if heads is not None and value != heads:
            raise ValueError(f"{value} is not num_attention_heads = {heads}; remove num_key_value_heads")
        return value

    @field_validator("qk_rope_head_dim")
    @classmethod
    def _fills_the_head(cls, value: int, info: ValidationInfo) -> int:
        whole, plain = info.data.get("head_dim"), info.data.get("qk_nope_head_dim")
        if value % 2:
            raise ValueError(f"{value} is odd, but positions rotate pairs of features; choose an even number")
        if whole is not None and plain is not None and whole != plain + value:
            raise ValueError(f"{plain} + {value} features are not head_dim = {whole}; remove head_dim")
        return value

    @field_validator("v_head_dim")
    @classmethod
    def _fits_into_a_key(cls, value: int, info: ValidationInfo) -> int:
        whole = info.data.get("head_dim")
        if whole is not None and value > whole:
            raise ValueError(f"{value} is more than the {whole} features of a key head; give at most {whole}")
        return value

    @field_validator("first_expert_layer")
    @classmethod
    def _some_layer_has_experts(cls, value: int, info: ValidationInfo) -> int:
        layers = info.data.get("num_layers")
        if layers is not None and value >= layers:
            raise ValueError(f"{value} leaves no layer of {layers} with experts; give at most {layers - 1}")
        return value

    @field_validator("num_groups")
    @classmethod
    def _divides_experts(cls, value: int, info: ValidationInfo) -> int:
        experts = info.data.get("num_experts")
        if experts is not None and experts % value:
            raise ValueError(f"{value} does not divide num_experts = {experts}; choose a divisor")
        return value

    @field_validator("top_groups")
    @classmethod
    def _reaches_enough_experts(cls, value: int, info: ValidationInfo) -> int:
        experts, groups, chosen = (info.data.get(name) for name in ("num_experts", "num_groups", "experts_per_token"))
        if experts is None or groups is None or chosen is None:
            return value
        if value > groups:
            raise ValueError(f"{value} is more than num_groups = {groups}; give at most {groups}")
        if chosen > (reachable := experts // groups * value):
            raise ValueError(
                f"{value} of {groups} groups have {reachable} experts, fewer than experts_per_token = {chosen}; raise "
                "top_groups, or lower experts_per_token"
            )
        return value

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.first_expert_layer

    def kind(self, layer: int) -> Hashable:
        """Key that is equal for layers of the same structure."""
        return self.has_experts(layer)

    def rope(self, layer: int) -> Rope:
        """Settings of the rotary positions of this layer."""
        return super().rope(layer)._replace(features=self.qk_rope_head_dim)

    def biased_projections(self) -> frozenset[str]:
        """Names of the attention projections with a bias."""
        return frozenset({"down", "kv_down", "o_proj"}) if self.attention_bias else frozenset()

    def value_features(self) -> int:
        """Features of a value head."""
        return self.v_head_dim

    def mixer_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of matrix elements that one token uses in the attention of a layer."""
        hidden, rank, heads = self.hidden_size, self.q_lora_rank, self.num_attention_heads
        queries = heads * self.head_dim
        of_queries = hidden * queries if rank is None else rank * (hidden + queries)
        of_latent = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        expanded = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_queries + of_latent + expanded + hidden * heads * self.v_head_dim

    def feed_forward_parameters(self, layer: int) -> int:
        """Number of weights that one token uses: all its experts and the router, or the SwiGLU of a dense layer."""
        if not self.has_experts(layer):
            return 3 * self.hidden_size * self.intermediate_size
        computing = self.experts_per_token + self.num_shared_experts
        return self.hidden_size * (3 * computing * self.moe_intermediate_size + self.num_experts)


def tiny() -> DeepSeekConfig:
    """Config of a model that runs in milliseconds on a CPU, with one dense layer and groups of experts."""
    latents = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    }  # fmt: skip
    experts = {
        "first_expert_layer": 1, "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24, "num_groups": 4,
        "top_groups": 2, "routed_scale": 1.5,
    }  # fmt: skip
    sizes = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    return DeepSeekConfig.model_validate({**sizes, "intermediate_size": 48, **latents, **experts})
