"""Hugging Face formats of Llama, Mistral, Qwen2 and GLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.config_json import flag, late_windows, late_windows_json
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import ATTENTION, SWIGLU, Family
from d9d_weights.hugging_face.fields import READ

from d9d_llama.config import GlmConfig, LlamaConfig, MistralConfig, Qwen2Config

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

C = TypeVar("C", bound=DenseConfig)
_LAYER = ATTENTION | SWIGLU
_WINDOWS = {"layer_types", "max_window_layers", "use_sliding_window"}
_SHARE = "partial_rotary_factor"


class _Format(DecoderFormat[C]):
    #: Default number of key and value heads for files without the field; ``None``: as many as query heads.
    key_value_heads: ClassVar[int | None] = None

    def special_json(self, config: C) -> dict[str, Any]:
        """Write the size of feed-forward layers."""
        return {"intermediate_size": config.intermediate_size}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes of feed-forward layers and heads."""
        return {"intermediate_size": data["intermediate_size"], "head_dim": data.get("head_dim") or 0}

    def config_from_json(self, data: Mapping[str, Any]) -> C:
        """Read a config; fields that old files lack get the defaults of transformers."""
        heads = self.key_value_heads or data.get("num_attention_heads")
        absent = {"rope_theta": 10_000.0, "tie_word_embeddings": False, "num_key_value_heads": heads}
        stated = {name: value for name, value in data.items() if value is not None or name not in absent}
        return super().config_from_json(absent | stated)


class LlamaHuggingFace(_Format[LlamaConfig]):
    """Format of transformers' ``LlamaForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family(
        "llama", "Llama", _LAYER, READ - _WINDOWS - {"sliding_window"}, {"pretraining_tp": (1,), "sliding_window": ()}
    )
    config = LlamaConfig

    def special_json(self, config: LlamaConfig) -> dict[str, Any]:
        """Write the fields of the base class, and whether projections have biases."""
        return super().special_json(config) | {"attention_bias": config.attention_bias}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, and whether projections have biases."""
        return super().special_fields(data) | {"attention_bias": flag(data, "attention_bias")}


class MistralHuggingFace(_Format[MistralConfig]):
    """Format of transformers' ``MistralForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family(
        "mistral", "Mistral", _LAYER, READ - _WINDOWS - {"attention_bias"}, {"attention_bias": (False,)}
    )
    config = MistralConfig
    key_value_heads = 8

    def special_json(self, config: MistralConfig) -> dict[str, Any]:
        """Write the fields of the base class, and the sliding window."""
        return super().special_json(config) | {"sliding_window": config.sliding_window}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, and the sliding window: 4096 if the file states none."""
        return super().special_fields(data) | {"sliding_window": data.get("sliding_window", 4096)}


class Qwen2HuggingFace(_Format[Qwen2Config]):
    """Format of transformers' ``Qwen2ForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("qwen2", "Qwen2", _LAYER, READ - {"attention_bias"}, {"attention_bias": (True,)})
    config = Qwen2Config
    key_value_heads = 32

    def special_json(self, config: Qwen2Config) -> dict[str, Any]:
        """Write the fields of the base class, and which layers use the sliding window."""
        return super().special_json(config) | late_windows_json(config)

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, and which layers use the sliding window."""
        window, first = late_windows(data, self.family)
        return super().special_fields(data) | {"sliding_window": window, "sliding_from_layer": first}


class GlmHuggingFace(_Format[GlmConfig]):
    """Format of transformers' ``GlmForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family(
        "glm",
        "Glm",
        ATTENTION | {"mlp.down_proj": "ffn.down_proj"},
        READ - _WINDOWS - {"sliding_window"} | {_SHARE},
        {"sliding_window": ()},
    )
    config = GlmConfig
    key_value_heads = 2

    def config_json(self, config: GlmConfig, dtype: str) -> dict[str, Any]:
        """Write a ``config.json``; transformers 5 reads the fraction of rotated features next to the rotary base."""
        data = super().config_json(config, dtype) | {_SHARE: config.partial_rotary_factor}
        for name in ("rope_parameters", "rope_scaling"):
            data[name] = data[name] and {**data[name], _SHARE: config.partial_rotary_factor}
        return data

    def special_json(self, config: GlmConfig) -> dict[str, Any]:
        """Write the fields of the base class, and whether queries, keys and values have biases."""
        # Without the field, transformers takes a padding token that is outside of small vocabularies.
        return super().special_json(config) | {"attention_bias": config.attention_bias, "pad_token_id": None}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, the biases and the fraction of rotated features."""
        found = {"attention_bias": flag(data, "attention_bias"), _SHARE: data[_SHARE]}
        return super().special_fields(data) | found

    def config_from_json(self, data: Mapping[str, Any]) -> GlmConfig:
        """Read a config, with ``partial_rotary_factor`` at the top level or inside of ``rope_parameters``."""
        absent = {_SHARE: 0.5, "attention_bias": True}
        found = absent | {name: value for name, value in data.items() if value is not None}
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := found.get(name), Mapping):
                found[_SHARE] = rope.get(_SHARE, found[_SHARE])
                found[name] = {key: value for key, value in rope.items() if key != _SHARE}
        return super().config_from_json(found)

    def layers(self, config: GlmConfig, stored: GlmConfig) -> list[Mapper]:
        """Mappers of the tensors in layers; a file has the gate and up projections of a layer in one tensor."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.graph.merging import Chunk

        gates = (
            Chunk(
                f"model.layers.{layer}.mlp.gate_up_proj.weight",
                (f"layers.{layer}.ffn.gate_proj.weight", f"layers.{layer}.ffn.up_proj.weight"),
            )
            for layer in range(config.num_layers)
        )
        return [*super().layers(config, stored), *gates]
