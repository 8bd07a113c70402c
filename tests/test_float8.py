"""Float8 on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL: dict[str, Any] = {
    "name": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 48,
    "max_positions": 64,
}  # fmt: skip
JOB: dict[str, Any] = {"model": MODEL, "precision": {"parameters": "bfloat16"}, "device": "cuda"}


@pytest.mark.thorough
def test_explain_says_what_is_in_float8_and_what_is_not(
    small_job: Callable[..., Path], d9d: Callable[..., Any]
) -> None:
    job = small_job(
        **JOB, parallel=["compile", {"name": "fp8", "modules": ["?_proj"]}], kernels={"grouped_linear": "fp8"}
    )
    status, out, err = d9d("explain", str(job), "--world-size", "1")
    assert status == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("recipe rowwise: 8 linear layers")
    assert lines[at - 1].startswith("fp8: layers.0.attention.q_proj")
    assert lines[at + 1].startswith("compile: layers.0")
    assert any(line.startswith("grouped_linear: fp8 (d9d-fp8") for line in lines)
    assert "fp8 accepts, priority 0: float8 products" in out


def test_a_cpu_is_told_how_to_try_it(small_job: Callable[..., Path], d9d: Callable[..., Any]) -> None:
    status, _, err = d9d("check", str(small_job(**{**JOB, "device": "cpu"}, parallel=["fp8"])))
    assert status == 2
    assert "the device 'cpu' has no products in float8; set emulate: true to emulate it slowly" in err
