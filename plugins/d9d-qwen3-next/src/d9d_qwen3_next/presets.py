"""Published sizes of Qwen3-Next and of the text models of Qwen3.5, as in their ``config.json``."""

from __future__ import annotations

from typing import Any

from d9d_nn.decoder.presets import TINY, Presets, sizes

_COMMON: dict[str, Any] = {
    "head_dim": 256, "rope_theta": 10_000_000.0, "max_positions": 262_144, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_NEXT = _COMMON | {
    "vocab_size": 151_936, "num_experts": 512, "experts_per_token": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_NEWER = _COMMON | {"vocab_size": 248_320}
_NEWER_MOE = _NEWER | {
    "num_experts": 256, "experts_per_token": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip

NEXT: Presets = {"80b-a3b": sizes(2048, 5120, 48, 16, 2, **_NEXT)}
DENSE: Presets = {
    "9b": sizes(4096, 12288, 32, 16, 4, **_NEWER),
    "27b": sizes(5120, 17408, 64, 24, 4, **_NEWER | {"linear_num_value_heads": 48}),
}
MOE: Presets = {
    "35b-a3b": {
        name: value for name, value in sizes(2048, 0, 40, 16, 2, **_NEWER_MOE).items() if name != "intermediate_size"
    }
}

#: Sizes of tiny models: layers of Gated DeltaNet, with two value heads for each key head, alternate with attention.
TINY_HYBRID = TINY | {
    "layer_types": ("linear_attention", "full_attention"), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "partial_rotary_factor": 0.5,
}  # fmt: skip
TINY_EXPERTS = {
    "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
}  # fmt: skip
