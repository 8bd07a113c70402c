"""Hugging Face formats of Gemma 2 and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_nn.decoder.config_json import flag, kinds_of_rope_json, layer_types, layer_types_json, merge_kinds_of_rope
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import ATTENTION, HEAD_NORMS, SWIGLU, Family
from d9d_weights.hugging_face.fields import READ

from d9d_gemma.config import GemmaConfig, tiny

_LAYER = ATTENTION | SWIGLU | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}  # fmt: skip
_READ = READ - {"max_window_layers", "use_sliding_window"} | {"final_logit_softcapping", "query_pre_attn_scalar"}
_LOCAL = {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}
_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_ONLY: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in _GELU.items()}
_ONLY |= {"cache_implementation": ("hybrid",), "sliding_window_size": (4096,)}
_BIDIRECTIONAL = "use_bidirectional_attention"
_SECOND = Family("gemma2", "Gemma2", _LAYER, _READ | {"attn_logit_softcapping"}, _ONLY | {_BIDIRECTIONAL: (False,)})
_THIRD_READ = _READ - {"is_causal"} | _LOCAL | {_BIDIRECTIONAL}
_THIRD_ONLY = _ONLY | {"is_causal": (True,)}  # is_causal: false means another window than use_bidirectional_attention
_THIRD = Family("gemma3_text", "Gemma3Text", _LAYER | HEAD_NORMS, _THIRD_READ, _THIRD_ONLY, "Gemma3ForCausalLM")
#: Defaults in transformers; only Gemma 2 has caps by default.
_ABSENT = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
#: Fields with plain values: transformers' names -> d9d's.
_NAMES = {name: name for name in ("head_dim", "intermediate_size", "query_pre_attn_scalar", "sliding_window")}
_NAMES |= {"attn_logit_softcapping": "score_softcap", "final_logit_softcapping": "logit_softcap"}


class GemmaHuggingFace(DecoderFormat[GemmaConfig]):
    """Format of transformers' ``Gemma2ForCausalLM``, ``Gemma3ForCausalLM`` and the other classes of their families."""

    family: ClassVar[Family] = _SECOND
    config = GemmaConfig

    def family_of(self, config: GemmaConfig) -> Family:
        """Family in transformers of the config's generation."""
        return _THIRD if config.generation == 3 else _SECOND

    def family_in(self, data: Mapping[str, Any]) -> Family:
        """Family in transformers of the ``model_type`` of a ``config.json``."""
        return _THIRD if data.get("model_type") == _THIRD.model_type else _SECOND

    def example(self, model_type: str) -> GemmaConfig:
        """Tiny config for a ``model_type``, for tests."""
        return tiny(2 if model_type == "gemma2" else 3)

    def special_json(self, config: GemmaConfig) -> dict[str, Any]:
        """Write sizes, soft caps and layer types; in generation 3 also both rotary bases."""
        found = _GELU | {theirs: getattr(config, ours) for theirs, ours in _NAMES.items()}
        found |= {"attention_bias": config.attention_bias, "layer_types": layer_types_json(config)}
        rope = kinds_of_rope_json(config) if config.generation == 3 else {}
        if config.attention_mask == "bidirectional":  # transformers halves the stated window
            found["sliding_window"] = 2 * (config.sliding_window - 1)
        return found | rope | {"pad_token_id": None}  # with the default 0, embedding 0 would get no gradient

    def direction_json(self, config: GemmaConfig) -> dict[str, Any]:
        """Write whether attention is bidirectional, which generation 3 states by a field of its own."""
        if config.attention_mask == "bidirectional" and config.generation == 3:
            return {_BIDIRECTIONAL: True}
        return super().direction_json(config)

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`."""
        third = self.family_in(data) is _THIRD
        both = {"attention_mask": "bidirectional", "sliding_window": data["sliding_window"] // 2 + 1}
        return {ours: data[theirs] for theirs, ours in _NAMES.items()} | {
            **(both if flag(data, _BIDIRECTIONAL) else {}),
            "generation": 3 if third else 2,
            "attention_bias": flag(data, "attention_bias"),
            "layer_types": layer_types(data, data.get("sliding_window_pattern", 6) if third else 2),
            "local_rope_theta": data.get("rope_local_base_freq"),
        }

    def config_from_json(self, data: Mapping[str, Any]) -> GemmaConfig:
        """Read a config; absent fields get the defaults of transformers."""
        if self.family_in(data) is _SECOND:
            return super().config_from_json({**_ABSENT, **_CAPS, "rope_theta": 1e4, **data})
        return super().config_from_json({**_ABSENT, **dict.fromkeys(_CAPS), **merge_kinds_of_rope(data, 1e6, 1e4)})
