"""Published sizes of DeepSeek-V3 and Moonlight, as in their ``config.json``."""

from __future__ import annotations

from typing import Any

from d9d_nn.decoder.presets import Presets

_HEADS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PRESETS: Presets = {
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2
    "671b": _HEADS | {
        "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "first_expert_layer": 3, "num_experts": 256,
        "experts_per_token": 8, "moe_intermediate_size": 2048, "num_shared_experts": 1, "num_groups": 8,
        "top_groups": 4, "routed_scale": 2.5, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "max_positions": 163_840,
        "rope_scaling": {
            "type": "yarn", "factor": 40.0, "original_max_positions": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    # Liu et al. 2025, "Muon is Scalable for LLM Training", section 3.1
    "moonlight-16b-a3b": _HEADS | {
        "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 11_264, "num_layers": 27,
        "num_attention_heads": 16, "q_lora_rank": None, "first_expert_layer": 1, "num_experts": 64,
        "experts_per_token": 6, "moe_intermediate_size": 1408, "num_shared_experts": 2, "num_groups": 1,
        "top_groups": 1, "routed_scale": 2.446, "rope_theta": 50_000.0, "rms_norm_eps": 1e-5, "max_positions": 8192,
    },
}  # fmt: skip
