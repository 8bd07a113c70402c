"""Weights go from safetensors to safetensors byte by byte in any layout, if training changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from d9d_transformers.config import example
from d9d_transformers.library import native_config, native_model

PLUGINS = [
    "d9d_moe.plugin", "d9d_nn.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin", "d9d_transformers.plugin",
    "d9d_testing.toy.plugin",
]  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
    "tp": {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"]},
    "pp": {"mesh": {"pp": 2}, "pipeline": "1f1b"},
}
#: Types by the conversions of their files: none, fused matrices, banks of experts, banks with a bias, latent keys.
TYPES = ["llama", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2"]


def values(source: Path, run: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Job of one step with the learning rate zero."""
    return {
        "steps": 1,
        "device": "cpu",
        "run": {"dir": str(run.parent), "name": run.name},
        "model": {"name": "transformers", "pretrained": str(source)},
        "task": "causal_lm",
        "data": {"name": "toy_tokens", "vocab_size": 96, "sequence_length": 16},
        "batch": {"size": 4, "microbatch": 2},
        "optimizer": {"name": "toy_optimizer", "lr": 0.0},
        "trackers": [],
        **layout,
    }


def train(jobs: list[dict[str, Any]]) -> None:
    for one in jobs:
        job = job_of(one, PLUGINS)
        job.build(lambda _: None, topology_here(job)).train()


@pytest.mark.thorough
def test_exports_of_unchanged_weights_have_the_bytes_of_their_source(tmp_path: Path) -> None:
    jobs, files = [], {}
    for kind in TYPES:
        torch.manual_seed(0)
        native = native_model(native_config(example(kind).config), "eager")
        source = tmp_path / kind
        native.save_pretrained(source)
        files[kind] = source / "model.safetensors"
        jobs += [values(source, tmp_path / "runs" / f"{kind}-{name}", layout) for name, layout in LAYOUTS.items()]
    World(2).run(train, jobs)
    for kind in TYPES:
        for name in LAYOUTS:
            exported = tmp_path / "runs" / f"{kind}-{name}" / "model" / "model.safetensors"
            assert tensors_of(exported) == tensors_of(files[kind]), (kind, name)


def tensors_of(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> dtype, shape and bytes, read without any library."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }
