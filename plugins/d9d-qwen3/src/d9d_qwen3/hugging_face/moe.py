"""Hugging Face format of Qwen3 models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from d9d_core.errors import CheckpointError
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import ATTENTION, HEAD_NORMS, SWIGLU, Family
from d9d_weights.hugging_face.fields import READ

from d9d_qwen3.moe_config import Qwen3MoeConfig

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

#: Fields of ``config.json`` that only models with experts have.
READ_OF_EXPERTS = frozenset(
    {
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
        "num_experts_per_tok", "num_local_experts",
    }
)  # fmt: skip


class Qwen3MoeHuggingFace(DecoderFormat[Qwen3MoeConfig]):
    """Hugging Face format of Qwen3-MoE: ``Qwen3MoeForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("qwen3_moe", "Qwen3Moe", ATTENTION | HEAD_NORMS, READ | READ_OF_EXPERTS)
    config = Qwen3MoeConfig

    def special_json(self, config: Qwen3MoeConfig) -> dict[str, Any]:
        """Write the sizes of experts, which layers are dense, and the window."""
        return experts_json(config) | {
            "attention_bias": config.attention_bias,
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": config.num_layers if config.sliding_window is None else 0,
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`; absent fields get the defaults of transformers."""
        return experts_fields(data) | {
            "attention_bias": bool(data.get("attention_bias")),
            "head_dim": data.get("head_dim") or 0,
            "sliding_window": _window(data),
        }

    def own_fields(self, config: Qwen3MoeConfig) -> dict[str, Any]:
        """Config fields that transformers does not have: balancing, capacity, and the layout of experts in files."""
        return own_expert_fields(config)

    def layers(self, config: Qwen3MoeConfig, stored: Qwen3MoeConfig) -> list[Mapper]:
        """Add the mappers of routers and experts, and of SwiGLU if some layers are dense."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.hugging_face.names import layer_names

        from d9d_qwen3.hugging_face.expert_names import mixtures

        dense = layer_names(SWIGLU) if config.dense_layers else ()
        return [*super().layers(config, stored), *mixtures(config, stored), *dense]


def experts_json(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Write the ``config.json`` fields of experts and dense layers."""
    return {
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "num_experts": config.num_experts,  # for transformers before 5
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.renormalise,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
    }


def experts_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of :func:`experts_json`; absent optional fields get the defaults of transformers.

    Raises:
        CheckpointError: the file contradicts itself, or a value has a wrong type.
        KeyError: a required field is missing.
    """
    return {
        "intermediate_size": data["intermediate_size"],
        "moe_intermediate_size": data["moe_intermediate_size"],
        "num_experts": _experts(data),
        "experts_per_token": data["num_experts_per_tok"],
        "renormalise": data.get("norm_topk_prob") or False,
        "dense_layers": _dense_layers(data),
    }


def own_expert_fields(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Config fields of experts that transformers does not have; only those that differ from their defaults."""
    defaults = {name: field.default for name, field in Qwen3MoeConfig.model_fields.items()}
    values = config.model_dump(mode="json", include={"balancing", "capacity", "expert_files"})
    return {name: value for name, value in values.items() if getattr(config, name) != defaults[name]}


def _experts(data: Mapping[str, Any]) -> Any:
    names = [name for name in ("num_local_experts", "num_experts") if name in data]
    if len({data[name] for name in names}) > 1:
        raise CheckpointError(
            f"config.json: num_local_experts is {data['num_local_experts']} and num_experts is {data['num_experts']}; "
            "both are the number of experts, so remove the wrong field"
        )
    return data[names[0] if names else "num_experts"]


def _dense_layers(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those in ``mlp_only_layers``, and those that ``decoder_sparse_step`` skips."""
    named, step = data.get("mlp_only_layers") or (), data.get("decoder_sparse_step", 1)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise CheckpointError(f"config.json: decoder_sparse_step is {step!r}; set it to a positive integer")
    return tuple(layer for layer in range(data["num_hidden_layers"]) if layer in named or (layer + 1) % step)


def _window(data: Mapping[str, Any]) -> Any:
    """Sliding window of all layers; in this family, transformers 5 does not support a window in only some layers."""
    # Evaluate the fields as transformers does, with its defaults.
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    if window is not None and data.get("max_window_layers", 0):
        raise CheckpointError(
            f"config.json: max_window_layers is {data['max_window_layers']} and the window is {window}; releases of "
            "transformers disagree about which layers then use the window. Set max_window_layers to 0 (all), or "
            "use_sliding_window to false (none)"
        )
    kinds, expected = set(data.get("layer_types") or ()), "full_attention" if window is None else "sliding_attention"
    if kinds - {expected}:
        raise CheckpointError(
            f"config.json: layer_types has {sorted(kinds)}, but all layers of qwen3_moe are {expected}; correct it"
        )
    return window
