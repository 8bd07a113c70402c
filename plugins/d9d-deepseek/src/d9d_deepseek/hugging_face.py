"""Hugging Face format of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from d9d_core.errors import CheckpointError
from d9d_nn.decoder.config_json import flag
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import SWIGLU, Family
from d9d_weights.hugging_face.fields import READ

from d9d_deepseek.config import DeepSeekConfig

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

#: Names in a layer: transformers' -> d9d's.
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "ffn_norm",
}
_QUERIES = {"self_attn.q_proj": "attention.q_proj"}
_LATENT_QUERIES = {
    "self_attn.q_a_proj": "attention.q_proj.down",
    "self_attn.q_a_layernorm": "attention.q_proj.norm",
    "self_attn.q_b_proj": "attention.q_proj.up",
}
_SHARED = {f"mlp.shared_experts.{name}": f"ffn.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
#: Fields with plain values: transformers' names -> d9d's.
_NAMES = {
    "intermediate_size": "intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "first_k_dense_replace": "first_expert_layer",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_groups",
    "topk_group": "top_groups",
    "norm_topk_prob": "renormalise",
    "routed_scaling_factor": "routed_scale",
}
#: Field with the number of layers that predict further tokens; they follow the other layers in the files.
_FURTHER = "num_nextn_predict_layers"
#: Largest accepted number of these layers, which d9d leaves out.
_MOST_FURTHER = 8
_READ = (READ - {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}).union(
    _NAMES,
    {_FURTHER, "qk_head_dim"},
    # Without effect on the model: settings of other training code.
    {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"},
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


class DeepSeekHuggingFace(DecoderFormat[DeepSeekConfig]):
    """Hugging Face format of DeepSeek-V3: ``DeepseekV3ForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("deepseek_v3", "DeepseekV3", _LAYER, _READ, _ONLY)
    config = DeepSeekConfig

    def special_json(self, config: DeepSeekConfig) -> dict[str, Any]:
        """Write the sizes of attention and of experts."""
        return {theirs: getattr(config, ours) for theirs, ours in _NAMES.items()} | {
            "head_dim": config.qk_rope_head_dim,  # as transformers writes it
            "attention_bias": config.attention_bias,
            "rope_interleave": True,
            "moe_layer_freq": 1,  # for the model code that was published with the weights
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            _FURTHER: 0,
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`.

        Raises:
            CheckpointError: there are more layers for further tokens than d9d leaves out, or YaRN has a variant that
                d9d does not compute.
        """
        further = data.get(_FURTHER) or 0
        if not isinstance(further, int) or further > _MOST_FURTHER:
            raise CheckpointError(f"config.json: {_FURTHER} is {further!r}; d9d reads models with 0 to {_MOST_FURTHER}")
        rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default" and rope.get("mscale_all_dim"):
            _check_mscale(rope, kind)
        values = {ours: data[theirs] for theirs, ours in _NAMES.items() if theirs != "q_lora_rank"}
        return {**values, "q_lora_rank": data.get("q_lora_rank"), "attention_bias": flag(data, "attention_bias")}

    def own_fields(self, config: DeepSeekConfig) -> dict[str, Any]:
        """Config fields that transformers does not have: balancing and capacity."""
        defaults = {name: DeepSeekConfig.model_fields[name].default for name in ("balancing", "capacity")}
        values = config.model_dump(mode="json", include=set(defaults))
        return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}

    def layers(self, config: DeepSeekConfig, stored: DeepSeekConfig) -> list[Mapper]:
        """Add the mappers of queries, routers, experts, and of SwiGLU if some layers are dense."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.hugging_face.names import layer_names

        biased = config.biased_projections()
        queries = layer_names(_QUERIES if config.q_lora_rank is None else _LATENT_QUERIES, biased)
        dense = layer_names(SWIGLU) if config.first_expert_layer else ()
        return [*super().layers(config, stored), *queries, *dense, *layer_names(_SHARED), *_mixtures(config)]

    def importer(self, config: DeepSeekConfig, stored: DeepSeekConfig) -> Mapper:
        """Mapper from files to the model. It leaves out the layers that predict further tokens."""
        from d9d_weights.graph.base import Parallel
        from d9d_weights.graph.select import Drop

        further = range(stored.num_layers, stored.num_layers + _MOST_FURTHER)
        names = (f"{prefix}layers.{layer}.{{rest*}}" for layer in further for prefix in ("", "model."))
        return Parallel(*(Drop(name, optional=True) for name in names)) >> super().importer(config, stored)


def _mixtures(config: DeepSeekConfig) -> Iterator[Mapper]:
    """Mappers of routers and routed experts."""
    from d9d_moe.expert_files import expert_files
    from d9d_weights.graph.mappers import Rename

    theirs, ours = "model.layers.{layer}.mlp.gate", "layers.{layer}.ffn.router"
    yield Rename(f"{theirs}.weight", f"{ours}.weight")
    # A buffer, which may be missing.
    yield Rename(f"{theirs}.e_score_correction_bias", f"{ours}.selection_bias", optional=True)
    for layer in range(config.first_expert_layer, config.num_layers):
        names = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.ffn.experts"
        yield expert_files(*names, config.num_experts)


def _check_mscale(rope: Mapping[str, Any], kind: str) -> None:
    """Refuse variants of YaRN in which transformers and d9d would scale scores differently."""
    if kind != "yarn" or not rope.get("mscale") or rope.get("attention_factor") is not None:
        raise CheckpointError(
            f"config.json: the rotary positions are {dict(rope)!r}; d9d supports mscale_all_dim only for rope_type "
            "yarn, together with mscale and without attention_factor; set mscale, or remove attention_factor"
        )
