"""Config of models that transformers implements. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from d9d_core.config import ModelConfig
from d9d_moe.balancing.config import Balancing
from d9d_nn.heads.config import CausalLMHeadConfig
from pydantic import JsonValue, field_validator

#: Fields of config.json that describe files or the program that wrote them, not the model.
VOLATILE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
_LAYERS, _HEADS, _GROUPS = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
_LAYERS_OF_EXAMPLE = 4
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
#: Sizes of a model that runs in milliseconds on a CPU.
TINY: Mapping[str, int] = {
    "hidden_size": 32, "intermediate_size": 48, _LAYERS: 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 8, "vocab_size": 128,
    "n_embd": 32, "n_layer": 2, "n_head": 4,
}  # fmt: skip
#: Sizes that must be at least 1.
_POSITIVE = ("hidden_size", "vocab_size", _LAYERS, _HEADS, _GROUPS)
_LFM2: dict[str, JsonValue] = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
#: Model type -> fields that an example config needs, because with transformers' defaults it would lack a kind of layer
#: that published models have.
_KINDS: Mapping[str, dict[str, JsonValue]] = {"lfm2": _LFM2, "lfm2_moe": _LFM2}
#: Field of config.json that makes d9d refuse a model if it is set -> reason.
_REFUSED = {
    "quantization_config": "quantized weights cannot be trained; use the weights that they were made from",
    "is_encoder_decoder": "d9d trains decoders; the model has an encoder, too",
}


class TransformersConfig(ModelConfig):
    """Decoder language model that transformers implements, described by its ``config.json``."""

    heads: ClassVar[Mapping[str, CausalLMHeadConfig]] = {"causal_lm": CausalLMHeadConfig()}
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"balancing"})

    name: Literal["transformers"] = "transformers"
    """Selects the plugin."""

    config: dict[str, JsonValue]
    """Contents of config.json: model_type, and the fields of this type that differ from transformers' defaults."""

    container: str | None = None
    """Type of a larger model, such as one of images and text, of which only the language model is trained."""

    balancing: tuple[Balancing, ...] | None = None
    """Load balancing of experts, at most one of each kind: auxiliary_loss, z_loss, bias_update. An empty list only
    counts the tokens of each expert, for the metric ``router``. Null: routers are not observed."""

    @field_validator("config")
    @classmethod
    def _is_a_decoder(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not isinstance(value.get("model_type"), str) or not value["model_type"]:
            raise ValueError("model.config has no model_type, such as llama; give the contents of a config.json")
        for name, why in _REFUSED.items():
            if value.get(name):
                raise ValueError(f"{name}: {why}")
        for name in _POSITIVE:
            if (size := _number(value.get(name))) is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        heads, groups = _number(value.get(_HEADS)), _number(value.get(_GROUPS))
        if heads and groups and heads % groups:
            raise ValueError(f"{_GROUPS} = {groups} does not divide {_HEADS} = {heads}")
        return {name: field for name, field in value.items() if name not in VOLATILE}

    def sizes(self) -> Mapping[str, int]:
        """Sizes of layers and experts that a smaller model may reduce, with defaults of transformers.

        Raises:
            CheckpointError: transformers has no such type, or refuses the config.
        """
        from d9d_transformers.library import native_config

        known = native_config(self.config).to_dict()
        found = {name: _number(known.get(name)) for name in TINY}
        return {name: size for name, size in found.items() if size is not None}

    def resized(self, sizes: Mapping[str, int]) -> TransformersConfig:
        """Config with other sizes; lists with an entry for each layer keep at least one entry of each kind.

        Raises:
            CheckpointError: transformers has no such type, or refuses the config.
            ValueError: the sizes are impossible.
        """
        fields, known = {**self.config, **sizes}, self.sizes()
        if _GROUPS in sizes and known.get(_GROUPS) == known.get(_HEADS):
            fields[_GROUPS] = sizes.get(_HEADS, known[_HEADS])  # some models need as many key as query heads
        before, after = self.sizes().get(_LAYERS), sizes.get(_LAYERS)
        if before is not None and after is not None:
            for name, value in self.config.items():
                if isinstance(value, list) and len(value) == before:
                    fields[name] = [value[index] for index in _kept(value, after)]
        if (words := sizes.get("vocab_size")) is not None:
            from d9d_transformers.library import native_config

            for name, value in native_config(self.config).to_dict().items():
                if name.endswith("_token_id") and isinstance(value, int) and value >= words:
                    fields[name] = words - 1
        return self.model_validate({**dict(self), "config": fields})

    @property
    def model_type(self) -> str:
        """Type of the model in transformers."""
        return str(self.config["model_type"])

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; ``None`` if the config leaves it to transformers' default."""
        return _number(self.config.get("vocab_size"))

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model supports; ``None`` if the config leaves it to transformers' default."""
        return _number(self.config.get("max_position_embeddings"))


def tiny() -> TransformersConfig:
    """Config of a Mixtral that runs in milliseconds on a CPU.

    It also holds the size fields of other model types, because ``d9d verify`` reduces a model of any type to these
    sizes.
    """
    about: dict[str, JsonValue] = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    return TransformersConfig(config={**TINY, **about})


def example(model_type: str) -> TransformersConfig:
    """Small config of a model type, with small values for all size fields, and without dropout.

    Raises:
        CheckpointError: transformers has no such type, or refuses the config.
    """
    from d9d_transformers.library import native_config

    known = native_config({"model_type": model_type}).to_dict()
    fields: dict[str, JsonValue] = {name: size for name, size in TINY.items() if name in known}
    before, after = _number(known.get(_LAYERS)), _LAYERS_OF_EXAMPLE
    if before is not None:
        fields[_LAYERS] = after = min(before, _LAYERS_OF_EXAMPLE)
    for name, value in known.items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or "jitter" in name):
            fields[name] = 0.0
        elif isinstance(value, list) and len(value) == before:
            fields[name] = [value[index] for index in _kept(value, after)]
    fields |= {name: number for number, name in enumerate(_TOKENS) if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # latents are expanded to a key head per query head
        fields["num_key_value_heads"] = TINY["num_attention_heads"]
    return TransformersConfig(config={"model_type": model_type, **fields, **_KINDS.get(model_type, {})})


def _kept(entries: Sequence[object], count: int) -> list[int]:
    """Indices of the list entries to keep: the first entry of each kind, and then entries from the beginning."""
    firsts = [index for index, entry in enumerate(entries) if entry not in entries[:index]][:count]
    others = [index for index in range(len(entries)) if index not in firsts]
    return sorted([*firsts, *others[: count - len(firsts)]])


def _number(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
