"""Qwen3 dense in Hugging Face layout: ``config.json`` as transformers 5 writes it, and its parameter names.

The layouts of all weights agree; only names differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from pydantic import ValidationError
from torch import Tensor

from d9d_qwen3.config import Qwen3Config

#: our name -> theirs, inside a layer, without ``.weight``.
_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_DTYPES = ("float32", "bfloat16", "float16")


class Qwen3HuggingFace:
    """Implements :class:`d9d_core.protocols.HuggingFaceFormat` for ``Qwen3ForCausalLM``."""

    def config_json(self, config: Qwen3Config, dtype: str) -> dict[str, Any]:
        """What ``Qwen3Config.from_pretrained`` of transformers reads.

        Args:
            config: our config.
            dtype: of the parameters: ``float32``, ``bfloat16`` or ``float16``.

        Raises:
            CheckpointError: Hugging Face layout has no such dtype.
        """
        if dtype not in _DTYPES:
            raise CheckpointError(f"config.json cannot state the dtype '{dtype}'; export one of {', '.join(_DTYPES)}")
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
            "rope_theta": config.rope_theta,  # transformers before 5
            "tie_word_embeddings": config.tie_embeddings,
            "initializer_range": config.initialization.std,
            "dtype": dtype,
            "torch_dtype": dtype,  # transformers before 5
            "use_cache": True,
        }

    def config_from_json(self, data: Mapping[str, Any]) -> Qwen3Config:
        """Our config for a published ``config.json``, of transformers 4 or 5.

        Raises:
            CheckpointError: it describes another architecture, a variant we do not compute, or no possible model.
        """
        if data.get("model_type") != "qwen3":
            raise CheckpointError(f"config.json: model_type is {data.get('model_type')!r}, expected 'qwen3'")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: rope_parameters is {rope!r}, not a mapping")
        refused = {
            "rope_parameters.rope_type": rope.get("rope_type", "default") not in ("default", None),
            "attention_bias": bool(data.get("attention_bias")),
            "use_sliding_window": bool(data.get("use_sliding_window")),
            "hidden_act": data.get("hidden_act", "silu") != "silu",
        }
        if bad := [field for field, is_bad in refused.items() if is_bad]:
            raise CheckpointError(f"config.json: qwen3 here has no variant with this {', '.join(bad)}")
        try:
            values = {
                "vocab_size": data["vocab_size"],
                "hidden_size": data["hidden_size"],
                "intermediate_size": data["intermediate_size"],
                "num_layers": data["num_hidden_layers"],
                "num_attention_heads": data["num_attention_heads"],
                "num_key_value_heads": data["num_key_value_heads"],
                "head_dim": data["head_dim"],
                "rms_norm_eps": data["rms_norm_eps"],
                "rope_theta": rope["rope_theta"] if "rope_theta" in rope else data["rope_theta"],
                "tie_embeddings": data["tie_word_embeddings"],
                "max_positions": data["max_position_embeddings"],
                "initialization": {"std": data["initializer_range"]},
            }
        except KeyError as error:
            raise CheckpointError(f"config.json: {error.args[0]} is missing") from error
        try:
            return Qwen3Config.model_validate(values)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors())
            raise CheckpointError(f"config.json: no qwen3 model has these values: {'; '.join(problems)}") from error

    def export_state(self, config: Qwen3Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our names to theirs, for the whole model or some of its parameters. A tied head appears nowhere.

        Raises:
            CheckpointError: a name is none of a model of this config.
        """
        return _rename(state, _names(config), "a parameter of qwen3 with this config")

    def import_state(self, config: Qwen3Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their names to ours. A copy of a tied head that some files hold is left out.

        Raises:
            CheckpointError: a name is none of a model of this config.
        """
        if config.tie_embeddings:
            state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        names = {theirs: ours for ours, theirs in _names(config).items()}
        return _rename(state, names, "a parameter of Qwen3ForCausalLM with this config")


def _names(config: Qwen3Config) -> dict[str, str]:
    """Every parameter of the model: our name -> theirs."""
    outside = {ours: theirs for ours, theirs in _OUTSIDE.items() if not (ours == "head" and config.tie_embeddings)}
    layers = {
        f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(config.num_layers)
        for ours, theirs in _LAYER.items()
    }
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in (outside | layers).items()}


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str], kind: str) -> dict[str, Tensor]:
    unknown = [name for name in state if name not in names]
    if unknown:
        raise CheckpointError(f"'{unknown[0]}' is not {kind} ({len(unknown)} such names)")
    return {names[name]: tensor for name, tensor in state.items()}
