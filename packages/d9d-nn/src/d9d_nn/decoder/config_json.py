"""Fields of ``config.json`` that decoders share, in the format of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from d9d_core.errors import CheckpointError
from d9d_weights.hugging_face.family import Family, published_head
from d9d_weights.hugging_face.fields import HARMLESS, check_fields

from d9d_nn.decoder.config import AlternatingConfig, DecoderConfig, DenseConfig, LayerType
from d9d_nn.heads.config import ClassificationHeadConfig, HeadConfig, TokenClassificationHeadConfig
from d9d_nn.rope.scaling import (
    DynamicScaling,
    NtkScaling,
    scaling_from_hugging_face,
    scaling_to_hugging_face,
    stretched_theta,
)

_DTYPES = ("float32", "bfloat16", "float16")
#: Field of ``config.json`` that holds the settings for which transformers has no field.
_OURS = "d9d"
#: Kinds of fields that an export copies from the pretrained model.
_KEPT = ("tokens", "how to generate")


def common_json(config: DecoderConfig, family: Family, dtype: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Write the ``config.json`` fields that decoders share.

    Args:
        config: d9d's config of the model.
        family: family of the model.
        dtype: dtype of the parameters: ``float32``, ``bfloat16`` or ``float16``.
        ours: further fields of this model that transformers does not have.

    Raises:
        CheckpointError: Hugging Face layout has no such dtype.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"config.json cannot state the dtype '{dtype}'; export one of {', '.join(_DTYPES)}")
    scaling, positions = config.rope_scaling, config.max_positions
    if isinstance(scaling, DynamicScaling):  # transformers has one field for this and for the longest sequence
        positions = scaling.original_max_positions
    theta = _stated_theta(config)
    rope = {"rope_theta": theta, **scaling_to_hugging_face(scaling)}
    own = {**_own_fields(config), **ours}
    return {
        "architectures": [_architecture(config, family)],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": theta,  # read by transformers before 5
        # read by transformers before 5
        "rope_scaling": None if rope["rope_type"] == "default" else scaling_to_hugging_face(scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initialization.std,
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before 5
        "use_cache": True,
        **_labels(config),
        **({_OURS: own} if own else {}),
    }


def kept_fields(source: Mapping[str, Any], config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Fields of a pretrained model's config to keep: special tokens, generation settings, unchanged class names."""
    kept = {name: source[name] for about in _KEPT for name in HARMLESS[about] if name in source}
    labels, own = source.get("id2label") or {}, _labels(config)
    if own and len(labels) == len(own["id2label"]) and source.get("architectures") == [_architecture(config, family)]:
        kept |= {name: source[name] for name in ("id2label", "label2id") if name in source}
    return dict(sorted(kept.items()))


def check_computable(data: Mapping[str, Any], family: Family) -> None:
    """Check that d9d's model of this family computes the model that a ``config.json`` describes.

    Raises:
        CheckpointError: the file describes another architecture, or an unsupported variant.
    """
    name = family.model_type
    if data.get("model_type") != name:
        raise CheckpointError(
            f"config.json: model_type is {data.get('model_type')!r}, not '{name}'; choose the model for this type"
        )
    check_fields(data, name, family.read, family.only)
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(data.get(field) or {}, Mapping):
            raise CheckpointError(f"config.json: {field} is {data[field]!r}; it must be a mapping or null")


def common_fields(data: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Read from a ``config.json`` the fields of d9d's config that all decoders share.

    Raises:
        CheckpointError: the file describes an unsupported variant.
        KeyError: a field is missing.
        TypeError: a value has an unexpected type. AttributeError is raised for the same reason.
    """
    rope, ours, positions = _rope(data), data.get(_OURS) or {}, data["max_position_embeddings"]
    is_language_model = _class_name(data, family) == family.language_model
    return {
        "vocab_size": data["vocab_size"],
        "hidden_size": data["hidden_size"],
        "num_layers": data["num_hidden_layers"],
        "num_attention_heads": data["num_attention_heads"],
        "num_key_value_heads": data["num_key_value_heads"],
        "rms_norm_eps": data["rms_norm_eps"],
        "rope_theta": rope["rope_theta"] if rope.get("rope_theta") is not None else data["rope_theta"],
        "rope_scaling": scaling_from_hugging_face(rope, positions),
        "tie_embeddings": data["tie_word_embeddings"] and "heads" not in ours and is_language_model,
        "max_positions": positions,
        "initialization": {"std": data["initializer_range"]},
        "heads": _heads(data, family),
        **({"attention_mask": "bidirectional"} if data.get("is_causal", True) is False else {}),
        **ours,
    }


def direction_json(config: DecoderConfig) -> dict[str, Any]:
    """Field by which transformers 5 computes bidirectional attention; empty for other attention.

    Raises:
        CheckpointError: a layer has a window too, whose positions transformers counts differently.
    """
    if config.attention_mask != "bidirectional":
        return {}
    if any(config.window(layer) is not None for layer in range(config.num_layers)):
        raise CheckpointError(
            "config.json: bidirectional attention within a sliding window is not supported for this model, because "
            "transformers counts the positions of such a window differently; use a model without sliding_window"
        )
    return {"is_causal": False}


def flag(data: Mapping[str, Any], name: str) -> bool:
    """Read a boolean field; false if it is null or absent.

    Raises:
        CheckpointError: the field is neither a boolean nor null.
    """
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {value!r}; it must be true or false")
    return bool(value)


def late_windows_json(config: DenseConfig) -> dict[str, Any]:
    """Write the fields about sliding windows, which :func:`late_windows` reads."""
    first = config.num_layers if config.sliding_window is None else config.sliding_from_layer
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": ["full_attention"] * first + ["sliding_attention"] * (config.num_layers - first),
    }


def late_windows(data: Mapping[str, Any], family: Family) -> tuple[int | None, int]:
    """Sliding window and first sliding layer of a ``config.json``, for models in which only later layers may slide.

    Raises:
        CheckpointError: ``layer_types`` has unknown kinds, not one kind for each layer, or full attention after sliding
            attention; or ``use_sliding_window`` is no boolean.
    """
    layers = data["num_hidden_layers"]
    # Reads these fields as transformers does, including its defaults.
    window = data.get("sliding_window", 4096) if flag(data, "use_sliding_window") else None
    kinds = data.get("layer_types")
    if kinds is None:
        first = min(data.get("max_window_layers", 28), layers)
    else:
        slides = [kind == "sliding_attention" for kind in kinds]
        first = slides.index(True) if True in slides else layers
        odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if odd or len(kinds) != layers or not all(slides[first:]):
            raise CheckpointError(
                f"config.json: layer_types is {kinds}; d9d supports {family.model_type} only with one entry per layer, "
                "full_attention first and sliding_attention after it"
            )
    if window is None or first >= layers:
        return None, 0
    return window, first


def layer_types_json(config: AlternatingConfig) -> list[str]:
    """Kinds of attention of all layers, for the field that :func:`layer_types` reads."""
    return [config.layer_type(layer) for layer in range(config.num_layers)]


def layer_types(data: Mapping[str, Any], pattern: int) -> list[str]:
    """Kinds of attention of the layers of a ``config.json``; by default every ``pattern``-th has full attention.

    Raises:
        CheckpointError: the number of kinds is not the number of layers.
    """
    kinds, layers = data.get("layer_types"), data["num_hidden_layers"]
    if kinds is None:
        return ["full_attention" if layer % pattern == 0 else "sliding_attention" for layer in range(1, layers + 1)]
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {layers} layers; give one for each layer"
        )
    return list(kinds)


def kinds_of_rope_json(config: AlternatingConfig) -> dict[str, Any]:
    """Write the rotary-position fields, which transformers 5 states separately for full and for sliding attention."""
    full = {"rope_theta": _stated_theta(config), **scaling_to_hugging_face(config.rope_scaling)}
    local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    kinds = {"full_attention": full, "sliding_attention": full if config.local_rope_theta is None else local}
    return {"rope_parameters": kinds, "rope_local_base_freq": kinds["sliding_attention"]["rope_theta"]}


def merge_kinds_of_rope(data: Mapping[str, Any], theta: float, local_theta: float) -> dict[str, Any]:
    """Convert rotary fields for each layer type to fields of full layers, and ``rope_local_base_freq`` of sliding ones.

    Args:
        data: contents of ``config.json``. Before transformers 5, ``rope_scaling`` was the scaling of full layers.
        theta: base of full layers if the file states none.
        local_theta: base of sliding layers if the file states none.

    Returns:
        Contents of ``config.json``; ``rope_local_base_freq`` is ``None`` if all layers rotate alike.

    Raises:
        CheckpointError: sliding layers have a scaling, and other settings than full layers; ``rope_parameters`` is no
            mapping of layer types; or ``rope_scaling`` is no mapping.
    """
    kinds, scaling = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    if not isinstance(kinds, Mapping) or kinds.keys() - set(get_args(LayerType)) or not isinstance(scaling, Mapping):
        raise CheckpointError(
            f"config.json: rope_parameters is {kinds!r} and rope_scaling is {scaling!r}; rope_parameters must be a "
            f"mapping of {' and '.join(get_args(LayerType))}, and rope_scaling a mapping or null"
        )
    bases = {"full_attention": ("rope_theta", theta), "sliding_attention": ("rope_local_base_freq", local_theta)}
    full, sliding = (
        {"rope_theta": data.get(name, default), "rope_type": "default", **(kinds.get(kind) or {})}
        for kind, (name, default) in bases.items()
    )
    full |= scaling
    if sliding != full and sliding["rope_type"] != "default":
        raise CheckpointError(f"config.json: rope_parameters is {kinds!r}; d9d supports scaling only in full_attention")
    local = None if sliding == full else sliding["rope_theta"]
    return {
        **data,
        "rope_theta": full["rope_theta"],
        "rope_parameters": None,
        "rope_scaling": full,
        "rope_local_base_freq": local,
    }


def _stated_theta(config: DecoderConfig) -> float:
    """Base of the frequencies for ``config.json``, which has no field for static NTK scaling."""
    if isinstance(config.rope_scaling, NtkScaling):
        features = config.rope(0).features or config.head_dim
        return stretched_theta(config.rope_theta, config.rope_scaling.factor, features)
    return config.rope_theta


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary positions: ``rope_scaling`` if present, as in transformers, else ``rope_parameters``."""
    parameters, scaling = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    theta = parameters.get("rope_theta")
    if scaling and theta is not None and scaling.get("rope_theta") is None and data.get("rope_theta") is None:
        raise CheckpointError(
            f"config.json: with rope_scaling {dict(scaling)!r}, transformers ignores rope_parameters, even its "
            f"rope_theta = {theta!r}, and uses 10000. Move the fields of rope_scaling into "
            "rope_parameters and remove rope_scaling, or add the intended rope_theta to rope_scaling"
        )
    return scaling or parameters


def _architecture(config: DecoderConfig, family: Family) -> str:
    head = published_head(config.heads)
    if head is None:
        return family.backbone
    kinds = {"causal_lm": family.language_model, "token_classification": family.token_classifier}
    return kinds.get(config.heads[head].kind, family.classifier)


def _labels(config: DecoderConfig) -> dict[str, Any]:
    name = published_head(config.heads)
    head: HeadConfig | None = None if name is None else config.heads[name]
    if not isinstance(head, ClassificationHeadConfig | TokenClassificationHeadConfig):
        return {}
    names = [f"LABEL_{index}" for index in range(head.num_classes)]
    # The padding token, by which transformers finds the last token of each sample in a batch, is unknown here.
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _own_fields(config: DecoderConfig) -> dict[str, Any]:
    """Extra fields of ``config.json`` that d9d needs to read the same model back."""
    fields: dict[str, Any] = {}
    if config.heads != DecoderConfig.model_fields["heads"].default:
        fields["heads"] = {name: head.model_dump(exclude_none=True) for name, head in config.heads.items()}
        fields["tie_embeddings"] = config.tie_embeddings
    if config.attention_mask in ("prefix", "blocks"):
        fields["attention_mask"] = config.attention_mask
    if config.added_tokens:
        fields["added_tokens"] = config.added_tokens
    if isinstance(config.rope_scaling, DynamicScaling):
        fields["max_positions"] = config.max_positions
    if isinstance(config.rope_scaling, NtkScaling):
        fields |= {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling.model_dump()}
    return fields


def _class_name(data: Mapping[str, Any], family: Family) -> str:
    names = data.get("architectures") or [family.language_model]
    return names if isinstance(names, str) else str(names[0])


def _heads(data: Mapping[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    kind = _class_name(data, family)
    if kind == family.language_model:
        return {"causal_lm": {"kind": "causal_lm"}}
    classifiers = {family.classifier: "classification", family.token_classifier: "token_classification"}
    if kind in classifiers:
        labels = data.get("id2label") or {}
        name = classifiers[kind]
        return {name: {"kind": name, "num_classes": len(labels) or data.get("num_labels", 2)}}
    if kind == family.backbone:
        return {"embedding": {"kind": "embedding"}}
    raise CheckpointError(
        f"config.json: architecture {kind} is not one of {family.model_type}; use one of "
        f"{family.language_model}, {family.classifier}, {family.token_classifier}, {family.backbone}"
    )
