"""Published sizes of Llama 3.1 and 3.2, Mistral 7B, Qwen2.5 and GLM-4, as in their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_nn.decoder.presets import Presets, sizes


def _scaled(factor: float) -> Mapping[str, Any]:
    scaling = {"type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "rope_scaling": scaling | {"original_max_positions": 8192},
        "rms_norm_eps": 1e-5,
        "max_positions": 131_072,
    }


LLAMA: Presets = {
    "1b": sizes(2048, 8192, 16, 32, 8, tie_embeddings=True, **_scaled(32.0)),
    "3b": sizes(3072, 8192, 28, 24, 8, tie_embeddings=True, **_scaled(32.0)),
    "8b": sizes(4096, 14336, 32, 32, 8, **_scaled(8.0)),
    "70b": sizes(8192, 28672, 80, 64, 8, **_scaled(8.0)),
    "405b": sizes(16384, 53248, 126, 128, 8, **_scaled(8.0)),
}
_MISTRAL = sizes(4096, 14336, 32, 32, 8, rms_norm_eps=1e-5, max_positions=32_768)
MISTRAL: Presets = {
    "7b": {**_MISTRAL, "vocab_size": 32_768, "rope_theta": 1_000_000.0},
    "7b-v0.1": {**_MISTRAL, "vocab_size": 32_000, "rope_theta": 10_000.0, "sliding_window": 4096},
}
QWEN2: Presets = {
    "0.5b": sizes(896, 4864, 24, 14, 2, vocab_size=151_936, tie_embeddings=True),
    "1.5b": sizes(1536, 8960, 28, 12, 2, vocab_size=151_936, tie_embeddings=True),
    "3b": sizes(2048, 11008, 36, 16, 2, vocab_size=151_936, tie_embeddings=True),
    "7b": sizes(3584, 18944, 28, 28, 4, vocab_size=152_064),
    "14b": sizes(5120, 13824, 48, 40, 8, vocab_size=152_064, rms_norm_eps=1e-5),
    "32b": sizes(5120, 27648, 64, 40, 8, vocab_size=152_064, rms_norm_eps=1e-5),
    "72b": sizes(8192, 29568, 80, 64, 8, vocab_size=152_064, rms_norm_eps=1e-5),
}
_GLM = {"vocab_size": 151_552, "rope_theta": 10_000.0, "rms_norm_eps": 1.5625e-7, "max_positions": 131_072}
GLM: Presets = {"4-9b": sizes(4096, 13696, 40, 32, 2, **_GLM)}
