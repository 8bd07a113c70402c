"""Qwen3 dense in Hugging Face layout: ``config.json`` as transformers 5 writes it, and its parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.state.mapper import Mapper
from d9d_nn.heads.config import CausalLMHeadConfig, ClassificationHeadConfig, HeadConfig
from d9d_nn.rope_scaling import DynamicScaling, scaling_from_hugging_face, scaling_to_hugging_face
from pydantic import ValidationError

from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.names import exporter, importer, published_head

_DTYPES = ("float32", "bfloat16", "float16")
#: What transformers has no field for.
_OURS = "d9d"


class Qwen3HuggingFace:
    """Implements :class:`d9d_core.protocols.HuggingFaceFormat` for transformers' Qwen3 classes.

    One head is theirs: a language model (``Qwen3ForCausalLM``) or a classifier over last tokens
    (``Qwen3ForSequenceClassification``). Others are kept under names of our own, which transformers leaves out.
    """

    def config_json(self, config: Qwen3Config, dtype: str) -> dict[str, Any]:
        """What ``Qwen3Config.from_pretrained`` of transformers reads.

        Args:
            config: our config.
            dtype: of the parameters: ``float32``, ``bfloat16`` or ``float16``.

        Raises:
            CheckpointError: Hugging Face layout has no such dtype, or no way to say what the model does.
        """
        if dtype not in _DTYPES:
            raise CheckpointError(f"config.json cannot state the dtype '{dtype}'; export one of {', '.join(_DTYPES)}")
        scaling, positions = config.rope_scaling, config.max_positions
        if isinstance(scaling, DynamicScaling):  # transformers has one field for both
            positions = scaling.original_max_positions
        rope = {"rope_theta": config.rope_theta, **scaling_to_hugging_face(scaling)}
        slides = config.sliding_window is not None
        first = config.sliding_from_layer if slides else config.num_layers
        kinds = ["full_attention"] * first + ["sliding_attention"] * (config.num_layers - first)
        return {
            "architectures": [_architecture(config)],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": config.attention_bias,
            "attention_dropout": 0.0,
            "use_sliding_window": slides,
            "sliding_window": config.sliding_window,
            "max_window_layers": first,
            "layer_types": kinds,
            "max_position_embeddings": positions,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": config.rope_theta,  # transformers before 5
            "rope_scaling": None if scaling is None else scaling_to_hugging_face(scaling),  # likewise
            "tie_word_embeddings": config.tie_embeddings,
            "initializer_range": config.initialization.std,
            "dtype": dtype,
            "torch_dtype": dtype,  # transformers before 5
            "use_cache": True,
            **_labels(config),
            **_own_fields(config),
        }

    def config_from_json(self, data: Mapping[str, Any]) -> Qwen3Config:
        """Our config for a published ``config.json``, of transformers 4 or 5.

        Raises:
            CheckpointError: it describes another architecture, a variant we do not compute, or no possible model.
        """
        if data.get("model_type") != "qwen3":
            raise CheckpointError(f"config.json: model_type is {data.get('model_type')!r}, expected 'qwen3'")
        if data.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"config.json: hidden_act is {data['hidden_act']!r}; qwen3 here computes silu only")
        if data.get("quantization_config"):
            raise CheckpointError(
                "config.json: these weights are quantized (quantization_config), which qwen3 here does not compute; "
                "take the weights that they were made from"
            )
        if data.get("attention_dropout"):
            raise CheckpointError("config.json: attention_dropout is not 0; qwen3 here drops no attention, set it to 0")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: rope_parameters is {rope!r}, not a mapping")
        ours = data.get(_OURS) or {}
        try:
            positions = data["max_position_embeddings"]
            window, first = _window(data)
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
                "rope_scaling": scaling_from_hugging_face(rope, positions),
                "attention_bias": bool(data.get("attention_bias")),
                "sliding_window": window,
                "sliding_from_layer": first,
                "tie_embeddings": data["tie_word_embeddings"] and "heads" not in ours and _is_language_model(data),
                "max_positions": positions,
                "initialization": {"std": data["initializer_range"]},
                "heads": _heads(data),
                **ours,
            }
        except KeyError as error:
            raise CheckpointError(f"config.json: {error.args[0]} is missing") from error
        except (TypeError, AttributeError) as error:
            raise CheckpointError(f"config.json: a value is of a kind that no qwen3 has there: {error}") from error
        try:
            return Qwen3Config.model_validate(values)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors())
            raise CheckpointError(f"config.json: no qwen3 model has these values: {'; '.join(problems)}") from error

    def importer(self, config: Qwen3Config, stored: Qwen3Config) -> Mapper:
        """See :func:`d9d_qwen3.names.importer`."""
        return importer(config, stored)

    def exporter(self, config: Qwen3Config) -> Mapper:
        """See :func:`d9d_qwen3.names.exporter`."""
        return exporter(config)


def _architecture(config: Qwen3Config) -> str:
    head = published_head(config)
    if head is None:
        return "Qwen3Model"
    is_language = isinstance(config.heads[head], CausalLMHeadConfig)
    return "Qwen3ForCausalLM" if is_language else "Qwen3ForSequenceClassification"


def _labels(config: Qwen3Config) -> dict[str, Any]:
    name = published_head(config)
    head: HeadConfig | None = None if name is None else config.heads[name]
    if not isinstance(head, ClassificationHeadConfig):
        return {}
    names = [f"LABEL_{index}" for index in range(head.num_classes)]
    # transformers needs a padding token to find the last real one in a batch; none is known here.
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _own_fields(config: Qwen3Config) -> dict[str, Any]:
    """What ``config.json`` must say besides, for us to read the same model back."""
    fields: dict[str, Any] = {}
    if config.heads != Qwen3Config.model_fields["heads"].default:
        fields["heads"] = {name: head.model_dump(exclude_none=True) for name, head in config.heads.items()}
        fields["tie_embeddings"] = config.tie_embeddings
    if config.added_tokens:
        fields["added_tokens"] = config.added_tokens
    if isinstance(config.rope_scaling, DynamicScaling):
        fields["max_positions"] = config.max_positions
    return {_OURS: fields} if fields else {}


def _is_language_model(data: Mapping[str, Any]) -> bool:
    return _class_name(data) == "Qwen3ForCausalLM"


def _class_name(data: Mapping[str, Any]) -> str:
    names = data.get("architectures") or ["Qwen3ForCausalLM"]
    return names if isinstance(names, str) else str(names[0])


def _heads(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    kind = _class_name(data)
    if kind == "Qwen3ForCausalLM":
        return {"causal_lm": {"kind": "causal_lm"}}
    if kind == "Qwen3ForSequenceClassification":
        labels = data.get("id2label") or {}
        return {"classification": {"kind": "classification", "num_classes": len(labels) or data.get("num_labels", 2)}}
    if kind == "Qwen3Model":
        return {"embedding": {"kind": "embedding"}}
    raise CheckpointError(
        f"config.json: architecture {kind} is not one that qwen3 has; these are: Qwen3ForCausalLM, "
        "Qwen3ForSequenceClassification, Qwen3Model"
    )


def _window(data: Mapping[str, Any]) -> tuple[int | None, int]:
    """Positions that sliding layers see, and the first such layer."""
    layers = data["num_hidden_layers"]
    # What transformers makes of it, its defaults included.
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    kinds = data.get("layer_types")
    if kinds is None:
        first = min(data.get("max_window_layers", 28), layers)
    else:
        slides = [kind == "sliding_attention" for kind in kinds]
        first = slides.index(True) if True in slides else layers
        odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if odd or len(kinds) != layers or not all(slides[first:]):
            raise CheckpointError(
                f"config.json: layer_types is {kinds}; qwen3 here has full_attention first and sliding_attention after"
            )
    if window is None or first >= layers:
        return None, 0
    return window, first
