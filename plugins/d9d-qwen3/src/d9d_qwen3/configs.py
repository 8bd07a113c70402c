"""The configs that one model class serves."""

from __future__ import annotations

from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.moe_config import Qwen3MoeConfig

AnyQwen3Config = Qwen3Config | Qwen3MoeConfig
