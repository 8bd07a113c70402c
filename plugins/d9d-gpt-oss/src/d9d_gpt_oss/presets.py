"""Published sizes of gpt-oss, as in their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_nn.decoder.presets import Presets, sizes


def _size(layers: int, experts: int) -> Mapping[str, Any]:
    return sizes(
        2880, 2880, layers, 64, 8, vocab_size=201_088, head_dim=64, num_experts=experts, experts_per_token=4,
        sliding_window=128, max_positions=131_072, rope_scaling={
            "type": "yarn", "factor": 32.0, "original_max_positions": 4096, "truncate": False,
        },
    )  # fmt: skip


#: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", table 1.
PRESETS: Presets = {"20b": _size(24, 32), "120b": _size(36, 128)}
