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
#: Names in a layer of multi-token prediction, outside of its decoder block: in DeepSeek's files -> d9d's.
_FURTHER_NAMES = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "shared_head.norm": "norm",
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
#: Field with the number of layers of multi-token prediction, whose indices in the files follow the other layers'.
_FURTHER = "num_nextn_predict_layers"
#: Largest accepted number of these layers, of which d9d reads as many as ``mtp.depths`` says.
_MOST_FURTHER = 8
#: Field that transformers reads: whether the hidden state comes before the embedding in these layers' projections.
_HIDDEN_FIRST = "mtp_hidden_states_first"
_READ = (READ - {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}).union(
    _NAMES,
    {_FURTHER, _HIDDEN_FIRST, "qk_head_dim"},
    # Settings of other training code, which have no effect on the model.
    {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"},
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OTHER_COPY = (
    "the {} of a layer that predicts further tokens differs from the model's, which d9d uses for both; set "
    "model.mtp.depths to 0 to leave the layer out"
)


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
            _FURTHER: config.mtp.depths,
            **({_HIDDEN_FIRST: True} if config.mtp.first == "hidden" else {}),
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`. Layers of multi-token prediction stay off.

        Raises:
            CheckpointError: there are more layers of multi-token prediction than d9d reads, or YaRN has a variant that
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
        if data.get(_HIDDEN_FIRST):
            values["mtp"] = {"depths": 0, "first": "hidden"}
        return {**values, "q_lora_rank": data.get("q_lora_rank"), "attention_bias": flag(data, "attention_bias")}

    def own_fields(self, config: DeepSeekConfig) -> dict[str, Any]:
        """Config fields that transformers does not have: balancing, capacity and multi-token prediction."""
        defaults = {name: DeepSeekConfig.model_fields[name].default for name in ("balancing", "capacity", "mtp")}
        values = config.model_dump(mode="json", include=set(defaults))
        return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}

    def layers(self, config: DeepSeekConfig, stored: DeepSeekConfig) -> list[Mapper]:
        """Add mappers of queries, routers, experts, dense layers' SwiGLU, and layers of multi-token prediction."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.hugging_face.names import layer_names

        biased = config.biased_projections()
        queries = layer_names(_queries(config), biased)
        dense = layer_names(SWIGLU) if config.first_expert_layer else ()
        further = (_further(config, depth) for depth in range(config.mtp.depths))
        return [
            *super().layers(config, stored), *queries, *dense, *layer_names(_SHARED), *_mixtures(config), *further,
        ]  # fmt: skip

    def importer(self, config: DeepSeekConfig, stored: DeepSeekConfig) -> Mapper:
        """Mapper from files to the model. It leaves out layers of multi-token prediction that the model lacks.

        Layers of multi-token prediction that the files do not have keep their initial values.

        Raises:
            CheckpointError: the files have another order of the projections' inputs.
        """
        from d9d_weights.graph.base import Parallel
        from d9d_weights.graph.mappers import Rename
        from d9d_weights.graph.select import Drop

        if config.mtp.depths and config.mtp.first != stored.mtp.first:
            raise CheckpointError(
                f"model.mtp.first is {config.mtp.first}, but the projections in the files read the {stored.mtp.first} "
                f"first; set it to {stored.mtp.first}"
            )
        apart: list[Mapper] = []
        for depth in range(_MOST_FURTHER):
            for prefix in ("", "model."):
                name = f"{prefix}layers.{stored.num_layers + depth}.{{rest*}}"
                read = depth < config.mtp.depths
                to = f"{_apart(depth)}.{{rest*}}"
                apart.append(Rename(name, to, optional=True) if read else Drop(name, optional=True))
        return Parallel(*apart) >> super().importer(config, stored)

    def exporter(self, config: DeepSeekConfig) -> Mapper:
        """Mapper from the model to files.

        As in DeepSeek's files, each layer of multi-token prediction gets copies of embedding and head, which software
        that runs these layers reads.
        """
        from d9d_weights.graph.base import Parallel
        from d9d_weights.graph.mappers import Rename
        from d9d_weights.graph.select import Share

        whole = super().exporter(config)
        if not config.mtp.depths:
            return whole
        places = [f"model.layers.{config.num_layers + depth}" for depth in range(config.mtp.depths)]
        named = [Rename(f"{_apart(depth)}.{{rest*}}", f"{place}.{{rest*}}") for depth, place in enumerate(places)]
        head = _EMBEDDING if config.tie_embeddings else _LM_HEAD
        copies: dict[str, list[str]] = {_EMBEDDING: [_EMBEDDING], head: [head]}
        for place in places:
            copies[_EMBEDDING].append(f"{place}.embed_tokens.weight")
            copies[head].append(f"{place}.shared_head.head.weight")
        return whole >> Parallel(*named, *(Share(name, tuple(targets)) for name, targets in copies.items()))


def _apart(depth: int) -> str:
    """Temporary name of a layer of multi-token prediction, which patterns of the other layers' names do not match."""
    return f"further.{depth}"


def _further(config: DeepSeekConfig, depth: int) -> Mapper:
    """Mapper of a layer of multi-token prediction; if the files lack its tensors, the layer is initialised anew."""
    from d9d_nn.decoder.multi_token import tensors_of_layer
    from d9d_weights.graph.base import Parallel
    from d9d_weights.graph.mappers import Rename
    from d9d_weights.graph.select import Copy, Either, Fresh

    from d9d_deepseek.model import build_block

    theirs, ours = _apart(depth), f"mtp.{depth}"
    names = [Rename(f"{theirs}.{old}.weight", f"{ours}.{new}.weight") for old, new in _FURTHER_NAMES.items()]
    in_block = {**_LAYER, **_queries(config), **_SHARED}
    biased = config.biased_projections()
    names += [
        Rename(f"{theirs}.{old}.{kind}", f"{ours}.block.{new}.{kind}")
        for old, new in in_block.items()
        for kind in ("weight", *(("bias",) if new.rpartition(".")[2] in biased else ()))
    ]
    head = _EMBEDDING if config.tie_embeddings else _LM_HEAD
    copies = (
        Copy(f"{theirs}.embed_tokens.weight", _EMBEDDING, _OTHER_COPY.format("embedding")),
        Copy(f"{theirs}.shared_head.head.weight", head, _OTHER_COPY.format("head")),
    )
    mixture = _mixture(config, theirs, f"{ours}.block")
    fresh = Fresh(tuple(f"{ours}.{name}" for name in tensors_of_layer(config, build_block, depth)))
    return Either(Parallel(*names, *mixture, *copies), fresh)


def _queries(config: DeepSeekConfig) -> Mapping[str, str]:
    """Names of the projections of queries: transformers' -> d9d's."""
    return _QUERIES if config.q_lora_rank is None else _LATENT_QUERIES


def _mixtures(config: DeepSeekConfig) -> Iterator[Mapper]:
    """Mappers of routers and routed experts."""
    from d9d_moe.expert_files import expert_files

    yield from _router("model.layers.{layer}", "layers.{layer}")
    for layer in range(config.first_expert_layer, config.num_layers):
        names = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.ffn.experts"
        yield expert_files(*names, config.num_experts)


def _mixture(config: DeepSeekConfig, theirs: str, ours: str) -> Iterator[Mapper]:
    """Mappers of the router and the routed experts of one layer."""
    from d9d_moe.expert_files import expert_files

    yield from _router(theirs, ours)
    yield expert_files(f"{theirs}.mlp.experts", f"{ours}.ffn.experts", config.num_experts)


def _router(theirs: str, ours: str) -> Iterator[Mapper]:
    from d9d_weights.graph.mappers import Rename

    yield Rename(f"{theirs}.mlp.gate.weight", f"{ours}.ffn.router.weight")
    # The selection bias is a buffer, which files may lack.
    yield Rename(f"{theirs}.mlp.gate.e_score_correction_bias", f"{ours}.ffn.router.selection_bias", optional=True)


def _check_mscale(rope: Mapping[str, Any], kind: str) -> None:
    """Refuse variants of YaRN in which transformers and d9d would scale scores differently."""
    if kind != "yarn" or not rope.get("mscale") or rope.get("attention_factor") is not None:
        raise CheckpointError(
            f"config.json: the rotary positions are {dict(rope)!r}; d9d supports mscale_all_dim only for rope_type "
            "yarn, together with mscale and without attention_factor; set mscale, or remove attention_factor"
        )
