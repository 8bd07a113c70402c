"""Published sizes of Gemma 2 and of the text models of Gemma 3, as in their ``config.json``."""

from __future__ import annotations

from typing import Any

from d9d_nn.decoder.presets import Presets, sizes

_SECOND: dict[str, Any] = {
    "generation": 2, "vocab_size": 256_000, "head_dim": 256, "rope_theta": 10_000.0, "max_positions": 8192,
    "sliding_window": 4096, "layer_types": ("sliding_attention", "full_attention"), "score_softcap": 50.0,
    "logit_softcap": 30.0,
}  # fmt: skip
_THIRD: dict[str, Any] = {
    "generation": 3, "vocab_size": 262_208, "head_dim": 256, "rope_theta": 1_000_000.0, "max_positions": 131_072,
    "rope_scaling": {"type": "linear", "factor": 8.0}, "local_rope_theta": 10_000.0, "sliding_window": 1024,
    "layer_types": ("sliding_attention",) * 5 + ("full_attention",),
}  # fmt: skip
_SMALL = _THIRD | {"vocab_size": 262_144, "max_positions": 32_768, "rope_scaling": None, "sliding_window": 512}
PRESETS: Presets = {
    "2-2b": sizes(2304, 9216, 26, 8, 4, **_SECOND),
    "2-9b": sizes(3584, 14336, 42, 16, 8, **_SECOND),
    "2-27b": sizes(4608, 36864, 46, 32, 16, **_SECOND | {"head_dim": 128, "query_pre_attn_scalar": 144}),
    "3-270m": sizes(640, 2048, 18, 4, 1, **_SMALL),
    "3-1b": sizes(1152, 6912, 26, 4, 1, **_SMALL),
    "3-4b": sizes(2560, 10240, 34, 8, 4, **_THIRD),
    "3-12b": sizes(3840, 15360, 48, 16, 8, **_THIRD),
    "3-27b": sizes(5376, 21504, 62, 32, 16, **_THIRD | {"head_dim": 128, "query_pre_attn_scalar": 168}),
}
