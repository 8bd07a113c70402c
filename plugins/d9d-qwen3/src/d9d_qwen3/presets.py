"""Published sizes of Qwen3, dense and with experts, as in their ``config.json``.

Source: Qwen team 2025, "Qwen3 Technical Report", tables 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_nn.decoder.presets import Presets, sizes

_COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "max_positions": 40_960,
}


def _dense(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Mapping[str, Any]:
    return sizes(hidden, intermediate, layers, heads, 8, tie_embeddings=tied, **_COMMON)


def _moe(hidden: int, intermediate: int, of_experts: int, layers: int, heads: int) -> Mapping[str, Any]:
    experts = {"moe_intermediate_size": of_experts, "num_experts": 128, "experts_per_token": 8}
    return sizes(hidden, intermediate, layers, heads, 4, tie_embeddings=False, **experts, **_COMMON)


PRESETS: Presets = {
    "0.6b": _dense(1024, 3072, 28, 16, tied=True),
    "1.7b": _dense(2048, 6144, 28, 16, tied=True),
    "4b": _dense(2560, 9728, 36, 32, tied=True),
    "8b": _dense(4096, 12288, 36, 32, tied=False),
    "14b": _dense(5120, 17408, 40, 40, tied=False),
    "32b": _dense(5120, 25600, 64, 64, tied=False),
}

MOE_PRESETS: Presets = {
    "30b-a3b": _moe(2048, 6144, 768, 48, 32),
    "235b-a22b": _moe(4096, 12288, 1536, 94, 64),
}
