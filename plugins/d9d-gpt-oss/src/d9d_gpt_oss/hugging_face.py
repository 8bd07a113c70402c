"""Hugging Face format of gpt-oss.

Shapes: E experts, H features, I features inside an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from d9d_core.errors import CheckpointError
from d9d_nn.decoder.config_json import flag, layer_types, layer_types_json
from d9d_nn.decoder.format import DecoderFormat
from d9d_weights.hugging_face.family import ATTENTION, Family
from d9d_weights.hugging_face.fields import READ

from d9d_gpt_oss.config import GptOssConfig

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

#: Fields with plain values: transformers' names -> d9d's.
_NAMES = {
    "intermediate_size": "intermediate_size", "num_local_experts": "num_experts", "sliding_window": "sliding_window",
    "num_experts_per_tok": "experts_per_token", "swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit",
    "head_dim": "head_dim",
}  # fmt: skip
#: OpenAI's own names -> transformers' names of the same values; files may have both.
_AGAIN = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}
_READ = READ - {"max_window_layers", "use_sliding_window"} | _NAMES.keys() | _AGAIN.keys() | {"initial_context_length"}
#: Defaults in transformers.
_ABSENT = {
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": True, "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOssHuggingFace(DecoderFormat[GptOssConfig]):
    """Format of transformers' ``GptOssForCausalLM`` and the other classes of its family.

    Experts are read from bfloat16 files and from MXFP4 files, which are dequantised; exports have no quantised weights.
    """

    family: ClassVar[Family] = Family("gpt_oss", "GptOss", ATTENTION, _READ)
    config = GptOssConfig

    def special_json(self, config: GptOssConfig) -> dict[str, Any]:
        """Write the sizes of experts, biases and layer types."""
        found = {theirs: getattr(config, ours) for theirs, ours in _NAMES.items()}
        return found | {
            "attention_bias": config.attention_bias,
            "layer_types": layer_types_json(config),
            "experts_per_token": config.experts_per_token,  # read by vLLM
        }

    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of :meth:`special_json`."""
        return {ours: data[theirs] for theirs, ours in _NAMES.items()} | {
            "attention_bias": flag(data, "attention_bias"),
            "layer_types": layer_types(data, 2),
        }

    def config_from_json(self, data: Mapping[str, Any]) -> GptOssConfig:
        """Read a config; absent fields get the defaults of transformers.

        Raises:
            CheckpointError: the base class cannot read the file, the weights are quantised in another way than MXFP4,
                or two fields contradict each other.
        """
        quantised = data.get("quantization_config")
        if isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4":
            data = {name: value for name, value in data.items() if name != "quantization_config"}
        for again, name in _AGAIN.items():
            if data.get(again) is not None and data.get(name) not in (None, data[again]):
                raise CheckpointError(
                    f"config.json: {again} is {data[again]!r} and {name} is {data[name]!r}; both are the same number, "
                    "so remove the wrong field"
                )
        given = {name: data[again] for again, name in _AGAIN.items() if data.get(again) is not None}
        rope = {} if data.get("rope_parameters") or data.get("rope_scaling") else {"rope_scaling": _YARN}
        return super().config_from_json({**_ABSENT, **rope, **data, **given})

    def own_fields(self, config: GptOssConfig) -> dict[str, Any]:
        """Config fields that transformers does not have: balancing and capacity."""
        values = config.model_dump(mode="json", include={"balancing", "capacity"})
        return {name: value for name, value in values.items() if value not in ([], None)}

    def layers(self, config: GptOssConfig, stored: GptOssConfig) -> list[Mapper]:
        """Add the mappers of sinks, routers and experts."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.graph.compose import Prefix
        from d9d_weights.graph.mappers import Rename

        theirs, ours = "model.layers.{layer}", "layers.{layer}"
        return [
            *super().layers(config, stored),
            Rename(f"{theirs}.self_attn.sinks", f"{ours}.attention.sinks.weight"),
            *(Rename(f"{theirs}.mlp.router.{kind}", f"{ours}.ffn.router.{kind}") for kind in ("weight", "bias")),
            *(
                Prefix(f"model.layers.{layer}.mlp.experts.", f"layers.{layer}.ffn.experts.", _experts())
                for layer in range(config.num_layers)
            ),
        ]


def _experts() -> Mapper:
    """Mapper of a layer's experts and their biases.

    bfloat16 files have ``gate_up_proj`` [E, H, 2 I], in which gate and up columns alternate. MXFP4 files have
    [E, 2 I, H], and [E, H, I] for ``down_proj``; their blocks and scales are split into gate and up before they are
    dequantised, so that each number is dequantised once.
    """
    from d9d_weights.graph.base import Parallel
    from d9d_weights.graph.interleaving import Deinterleave
    from d9d_weights.graph.mappers import Identity, Rename, Transpose
    from d9d_weights.graph.mxfp4 import DequantiseMXFP4
    from d9d_weights.graph.select import Either

    names, parts = ("gate_proj", "up_proj", "down_proj"), ("blocks", "scales")
    plain = Parallel(Deinterleave("gate_up_proj", names[:2], dim=2), Identity(names[2:]))
    split = (Deinterleave(f"gate_up_proj_{part}", [f"{name}_{part}" for name in names[:2]], dim=1) for part in parts)
    kept = Identity(tuple(f"down_proj_{part}" for part in parts))
    quantised = Parallel(*split, kept) >> Parallel(*(DequantiseMXFP4(name) >> Transpose(name) for name in names))
    matrices = Either(plain, quantised)
    biases = Deinterleave("gate_up_proj_bias", ("gate_bias", "up_bias"), dim=1)
    return Parallel(matrices, biases, Rename("down_proj_bias", "down_bias"))
