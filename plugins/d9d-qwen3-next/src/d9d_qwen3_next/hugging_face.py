"""Hugging Face formats of Qwen3-Next and Qwen3.5: ``config.json`` and parameter names of transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from d9d_core.errors import CheckpointError
from d9d_nn.decoder.config_json import flag
from d9d_nn.decoder.format import DecoderFormat
from d9d_qwen3.hugging_face.moe import READ_OF_EXPERTS, experts_fields, experts_json, own_expert_fields
from d9d_weights.hugging_face.family import Family
from d9d_weights.hugging_face.fields import READ

from d9d_qwen3_next.config import (
    HybridConfig,
    Qwen3NextConfig,
    Qwen35Config,
    Qwen35MoeConfig,
    tiny,
    tiny_dense,
    tiny_moe,
)

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

C = TypeVar("C", bound=HybridConfig)
X = TypeVar("X", bound=Qwen3NextConfig)

_SHARE = "partial_rotary_factor"
#: Fields that have the same name in d9d and transformers -> transformers' defaults.
_SIZES = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "head_dim": 256, _SHARE: 0.25,
}  # fmt: skip
#: Field with the number of layers of multi-token prediction, which are off unless the job turns them on.
_FURTHER = "mtp_num_hidden_layers"
_READ = READ - {"max_window_layers", "sliding_window"} | _SIZES.keys()
_READ = _READ | {"full_attention_interval", _FURTHER, "mtp_use_dedicated_embeddings"}
_SHARED = "shared_expert_intermediate_size"
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,), "sliding_window": (), "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",),
}  # fmt: skip
_READ = _READ - {"use_sliding_window"}


class HybridFormat(DecoderFormat[C]):
    """Base of the formats of decoders with Gated DeltaNet and gated attention.

    Attributes:
        container: ``model_type`` of published models that also read images, and of which only the text model is read;
            ``""`` if there are no such models.
        joined: whether files hold all projections of Gated DeltaNet in two matrices, with rows sorted by key head.
    """

    container: ClassVar[str] = ""
    joined: ClassVar[bool] = False

    @abstractmethod
    def example(self, model_type: str) -> C:
        """Tiny config for a ``model_type``, for tests."""

    def config_json(self, config: C, dtype: str) -> dict[str, Any]:
        """Write a ``config.json``; transformers 5 reads the fraction of rotated features next to the rotary base."""
        data = super().config_json(config, dtype)
        for name in ("rope_parameters", "rope_scaling"):
            data[name] = data[name] and {**data[name], _SHARE: config.partial_rotary_factor}
        return data

    def special_json(self, config: C) -> dict[str, Any]:
        """Write the sizes of Gated DeltaNet, the fraction of rotated features, biases and the kinds of layers."""
        kinds = (config.layer_types[layer % len(config.layer_types)] for layer in range(config.num_layers))
        return {name: getattr(config, name) for name in _SIZES} | {
            "attention_bias": config.attention_bias,
            "layer_types": list(kinds),
            "pad_token_id": None,  # with a default, one embedding would get no gradient
            **({_FURTHER: 1} if config.mtp.depths else {}),
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`."""
        return {name: data[name] for name in _SIZES} | {
            "attention_bias": flag(data, "attention_bias"),
            "layer_types": _layer_types(data),
        }

    def config_from_json(self, data: Mapping[str, Any]) -> C:
        """Read a config; absent fields get transformers' defaults. A model that reads images gives its text model."""
        if self.container and data.get("model_type") == self.container:
            data = _text_config(data)
        found: dict[str, Any] = {**_SIZES, "tie_word_embeddings": False, "initializer_range": 0.02}
        found |= {name: value for name, value in data.items() if value is not None}
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := found.get(name), Mapping):
                found[_SHARE] = rope.get(_SHARE, found[_SHARE])
                # mrope divides features between positions in images; a text has one position per token, so mrope has
                # no effect.
                found[name] = {key: value for key, value in rope.items() if key != _SHARE and "mrope" not in key}
        return super().config_from_json(found)

    def own_fields(self, config: C) -> dict[str, Any]:
        """Config fields that transformers does not have: multi-token prediction."""
        return {"mtp": config.mtp.model_dump(mode="json")} if config.mtp.depths else {}

    def layers(self, config: C, stored: C) -> list[Mapper]:
        """Mappers of the tensors in layers, except experts, and of the layer of multi-token prediction."""
        # Imported here, because reading a config must not import torch.
        from d9d_qwen3_next.names import further_mapper, layer_mappers

        further = [further_mapper(config, stored)] if config.mtp.depths else []
        return [*layer_mappers(config, joined=self.joined), *further]

    def importer(self, config: C, stored: C) -> Mapper:
        """Mapper from files to the model; leaves out image encoders, and multi-token prediction if switched off."""
        from d9d_qwen3_next.names import text_only

        return text_only(further=config.mtp.depths > 0) >> super().importer(config, stored)


class ExpertsFormat(HybridFormat[X]):
    """Base of the formats of models with experts and a shared expert."""

    def special_json(self, config: X) -> dict[str, Any]:
        """Write the fields of the base class, and the sizes of experts and of the shared expert."""
        shared = {_SHARED: config.shared_expert_intermediate_size}
        return super().special_json(config) | experts_json(config) | shared

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, and the sizes of experts and of the shared expert."""
        return super().special_fields(data) | experts_fields(data) | {_SHARED: data[_SHARED]}

    def own_fields(self, config: X) -> dict[str, Any]:
        """Config fields that transformers does not have: of experts (such as balancing), and multi-token prediction."""
        return super().own_fields(config) | own_expert_fields(config)

    def layers(self, config: X, stored: X) -> list[Mapper]:
        """Add the mappers of routers, experts and shared experts."""
        from d9d_qwen3_next.names import expert_mappers

        return [*super().layers(config, stored), *expert_mappers(config, stored)]


class Qwen3NextHuggingFace(ExpertsFormat[Qwen3NextConfig]):
    """Format of transformers' ``Qwen3NextForCausalLM`` and the other classes of its family."""

    family: ClassVar[Family] = Family("qwen3_next", "Qwen3Next", {}, _READ | READ_OF_EXPERTS | {_SHARED}, _ONLY)
    config = Qwen3NextConfig
    joined: ClassVar[bool] = True

    def example(self, model_type: str) -> Qwen3NextConfig:  # noqa: ARG002 - there is one type
        """Tiny config for a ``model_type``, for tests."""
        return tiny()


class Qwen35HuggingFace(HybridFormat[Qwen35Config]):
    """Format of transformers' ``Qwen3_5ForCausalLM``, and of the text model in ``Qwen3_5ForConditionalGeneration``."""

    family: ClassVar[Family] = Family(
        "qwen3_5_text", "Qwen3_5Text", {}, _READ | {"mlp_only_layers"}, _ONLY, "Qwen3_5ForCausalLM"
    )
    config = Qwen35Config
    container: ClassVar[str] = "qwen3_5"

    def example(self, model_type: str) -> Qwen35Config:  # noqa: ARG002 - both types have one text model
        """Tiny config for a ``model_type``, for tests."""
        return tiny_dense()

    def special_json(self, config: Qwen35Config) -> dict[str, Any]:
        """Write the fields of the base class, and the size of feed-forward layers."""
        return super().special_json(config) | {"intermediate_size": config.intermediate_size}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of the base class, and the size of feed-forward layers."""
        return super().special_fields(data) | {"intermediate_size": data["intermediate_size"]}


#: Fields that the ``config.json`` of Qwen3.5 with experts does not have.
_FIXED = ("intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")


class Qwen35MoeHuggingFace(ExpertsFormat[Qwen35MoeConfig]):
    """Format of ``Qwen3_5MoeForCausalLM``, and of the text model in ``Qwen3_5MoeForConditionalGeneration``."""

    family: ClassVar[Family] = Family(
        "qwen3_5_moe_text", "Qwen3_5MoeText", {}, _READ | READ_OF_EXPERTS | {_SHARED}, _ONLY, "Qwen3_5MoeForCausalLM"
    )
    config = Qwen35MoeConfig
    container: ClassVar[str] = "qwen3_5_moe"

    def example(self, model_type: str) -> Qwen35MoeConfig:  # noqa: ARG002 - both types have one text model
        """Tiny config for a ``model_type``, for tests."""
        return tiny_moe()

    def special_json(self, config: Qwen35MoeConfig) -> dict[str, Any]:
        """Write the fields of the base class that this family has."""
        return {name: value for name, value in super().special_json(config).items() if name not in _FIXED}

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`."""
        found = super().special_fields({"intermediate_size": 0, "norm_topk_prob": True, **data})
        return {name: value for name, value in found.items() if name != "intermediate_size"}


def _text_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Config of the text model in the config of a model that also reads images."""
    found = data.get("text_config")
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"config.json: text_config is {found!r}, but model_type {data['model_type']} has the config of its text "
            "model there; take the config.json of the published model"
        )
    outside = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
    return {**{name: data[name] for name in outside if name in data}, **found}


def _layer_types(data: Mapping[str, Any]) -> list[str]:
    """Kinds of the layers; by default every ``full_attention_interval``-th layer has attention.

    Raises:
        CheckpointError: the number of kinds is not the number of layers, or the interval is not positive.
    """
    kinds, layers, interval = data.get("layer_types"), data["num_hidden_layers"], data.get("full_attention_interval", 4)
    if kinds is None:
        if not isinstance(interval, int) or interval < 1:
            raise CheckpointError(f"config.json: full_attention_interval is {interval!r}; set it to a positive integer")
        return ["linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)]
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {layers} layers; give one for each layer"
        )
    return list(kinds)
