"""Settings of a comparison: model, length, data and number format, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Literal

Data = Literal["random", "packed"]
Precision = Literal["bfloat16", "autocast", "fp8"]

#: The optimizer of all contenders: AdamW, and the limit on the gradient norm.
LR, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
#: Scales of float8: one for each row of an operand.
RECIPE = "rowwise"
#: LoRA, on all linear layers.
RANK, ALPHA = 16, 32
#: Tokens of a step.
TOKENS = 16_384
#: Length from which on blocks use activation checkpointing.
CHECKPOINTED = 65_536

_DENSE = {"name": "qwen3", "vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
#: Package of each model by its name in a job file.
PLUGINS: Mapping[str, str] = {
    "qwen3": "d9d_qwen3", "qwen3_moe": "d9d_qwen3", "llama": "d9d_llama", "qwen3_5": "d9d_qwen3_next",
    "gpt_oss": "d9d_gpt_oss",
}  # fmt: skip
#: Models by name, in the form of a job file.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense-0.6b": _DENSE | {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "tie_embeddings": True},
    "dense-1.7b": _DENSE | {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28, "tie_embeddings": True},
    "dense-2b": _DENSE | {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28},
    "moe-5.6b": {
        "name": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "experts_per_token": 8,
        "moe_intermediate_size": 768,
    },
    "llama-8b": {
        "name": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500_000.0,
    },
    "qwen3-8b": _DENSE | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_layers": 36, "num_attention_heads": 32,
    },
    "gpt-oss-20b": {"name": "gpt_oss", "preset": "20b", "vocab_size": 201_088, "max_positions": 131_072},
    # Published sizes with fewer layers: of Qwen3.5-9B the first 8, of gpt-oss-20b the first 6.
    "qwen3.5-3.8b": {
        "name": "qwen3_5", "preset": "9b", "num_layers": 8, "vocab_size": 248_320, "max_positions": 262_144,
    },
    "gpt-oss-6b": {
        "name": "gpt_oss", "preset": "20b", "num_layers": 6, "vocab_size": 201_088, "max_positions": 131_072,
    },
    "tiny-llama": _TINY | {"name": "llama", "intermediate_size": 96},
    "tiny": _TINY | {"name": "qwen3", "intermediate_size": 96},
    "tiny-delta": _TINY | {
        "name": "qwen3_5", "intermediate_size": 96, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "tiny-moe": _TINY | {"name": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of one table: the same for all contenders.

    Attributes:
        model: name in :data:`MODELS`.
        length: positions of a sample.
        samples: samples of a step.
        data: ``random`` tokens in samples of one document, or ``packed`` documents.
        precision: ``bfloat16``: parameters and optimizer states in bfloat16; ``autocast``: both in float32, with
            autocast to bfloat16; ``fp8``: as ``bfloat16``, and the products of linear layers in blocks in float8, by
            the recipe :data:`RECIPE`.
        checkpointed: whether activations are computed again in the backward.
        lora: whether LoRA is trained, and the model's weights are frozen.
        backend: compiler behind Dynamo.
        warmup: number of steps before the measured ones, in each round.
        steps: measured steps of a round.
    """

    model: str
    length: int
    samples: int
    data: Data = "random"
    precision: Precision = "bfloat16"
    checkpointed: bool = False
    lora: bool = False
    backend: str = "inductor"
    warmup: int = 5
    steps: int = 20

    @classmethod
    def of(cls, model: str, length: int, **more: Any) -> Setting:
        """Setting of a length with as many samples as the tokens of a step allow."""
        return cls(model, length, max(1, TOKENS // length), checkpointed=length >= CHECKPOINTED, **more)

    @property
    def name(self) -> str:
        """Name of the table: ``dense-2b-4k-random``."""
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        precision = [] if self.precision == "bfloat16" else [self.precision]
        more = [*(["lora"] if self.lora else []), *(["checkpointed"] if self._checkpoints_early else [])]
        return "-".join([self.model, length, self.data, *precision, *more])

    @property
    def _checkpoints_early(self) -> bool:
        """Whether activations are computed again at a length at which tables have no checkpointing by default."""
        return self.checkpointed and self.length < CHECKPOINTED

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return 4 if self.precision == "autocast" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.samples * self.length

    @property
    def model_values(self) -> dict[str, Any]:
        """Model section in the form of a job file."""
        return {"max_positions": self.length, **MODELS[self.model]}

    def _spec(self) -> Any:
        from d9d_core.registry.registry import Registry

        name = self.model_values["name"]
        return Registry.of(import_module(f"{PLUGINS[name]}.plugin")).find("model", name).spec

    def config(self) -> Any:
        """Config of the model."""
        return self._spec().config.load().model_validate(self.model_values)

    def files(self) -> Any:
        """Hugging Face format of the model."""
        return self._spec().hugging_face.load()()

    def matmul_flops_per_token(self) -> float:
        """FLOPs per token of products with weights; frozen weights have no gradient, and LoRA's own are not counted."""
        from d9d_nn.decoder.flops import further_parameters, head_parameters, layer_parameters

        config = self.config()
        parameters = layer_parameters(config) + head_parameters(config, self.length) + further_parameters(config)
        return (4.0 if self.lora else 6.0) * parameters

    def flops_per_token(self) -> float:
        """FLOPs per token, forward and backward, by the formula used for all contenders."""
        from d9d_nn.decoder.flops import training_flops_per_token

        trained = replace(self, lora=False).matmul_flops_per_token()
        return training_flops_per_token(self.config(), self.length) - trained + self.matmul_flops_per_token()

    def as_json(self) -> dict[str, Any]:
        """Values for a file; :meth:`from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setting:
        """Setting of such values."""
        return cls(**values)
