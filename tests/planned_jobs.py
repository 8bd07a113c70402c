"""Jobs whose costs are predicted, and output of the planner and the command line about them."""

from __future__ import annotations

from typing import Any

from d9d_core.errors import D9dError
from d9d_core.job import JobFile
from d9d_planner.device import Device
from d9d_planner.prediction import Prediction, predict
from typer.testing import CliRunner

GIB = 2**30
DENSE = {
    "name": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_positions": 4096,
}  # fmt: skip
EXPERTS = {
    "name": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "experts_per_token": 8,
    "moe_intermediate_size": 768, "max_positions": 4096,
}  # fmt: skip
SMALL = {
    "name": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
}  # fmt: skip
FEW_EXPERTS = {
    "name": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32,
    "max_positions": 64,
}  # fmt: skip


def values(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "steps": 10,
        "model": model,
        "task": "causal_lm",
        "data": {"name": "text", "sources": ["x"], "sequence_length": model.get("max_positions", 4096)},
        "batch": {"size": 4},
        "parallel": ["compile"],
        "precision": {"parameters": "bfloat16"},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        **sections,
    }


def prediction(model: dict[str, Any], device: str = "h200", **sections: Any) -> Prediction:
    job = JobFile.from_values(values(model, **sections))
    return predict(job, job.registry, job.views(), Device.named(device))


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit status and output of ``d9d``."""
    from d9d_core.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, D9dError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output
