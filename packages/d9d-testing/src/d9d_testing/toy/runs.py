"""Jobs that use the toy plugin, and results of their runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from safetensors.torch import load_file
from torch import Tensor

from d9d_testing.logs import read_log
from d9d_testing.toy import plugin


@cache
def toy_registry() -> Registry:
    """Registry of d9d-core, d9d-engine and the toy plugin; cached, because registries are immutable."""
    return Registry.of(plugin)


def toy_job(directory: Path, *overrides: str, **sections: Any) -> Job:
    """Job of a toy run: twelve steps in milliseconds.

    Args:
        directory: directory for the job file and the runs.
        overrides: assignments ``section.field=value``.
        sections: sections that replace or extend the job file.
    """
    values: dict[str, Any] = {
        "run": {"name": "toy", "dir": str(directory / "runs")},
        "steps": 12,
        "device": "cpu",
        "batch": {"size": 8, "microbatch": 4},
        "model": "toy_model",
        "data": "toy_data",
        "task": {"name": "toy_task", "decay": 0.01},
        "optimizer": "toy_optimizer",
        "metrics": ["toy_metric"],
        # No picture of the losses: drawing it takes as long as the steps.
        "trackers": ["console", {"name": "jsonl", "picture": False}],
        "logging": {"every": 5},
        "checkpoint": {"every": 4},
        **sections,
    }
    path = directory / "job.json"
    path.write_text(json.dumps(values))
    return Job.load(path, registry=toy_registry(), overrides=overrides)


def quiet(job: Job) -> Trainer:
    """Build a trainer without printed notes."""
    return job.build(lambda _: None)


def noted(job: Job) -> tuple[Trainer, list[str]]:
    """Build a trainer; return it and the notes that the job logs while it is built."""
    notes: list[str] = []
    return job.build(notes.append), notes


def metrics_of(job: Job) -> list[dict[str, Any]]:
    """Entries of the run's metrics.jsonl."""
    return read_log(job.run.directory)


def final_tensors(job: Job) -> dict[str, Tensor]:
    """Tensors of the run's newest checkpoint."""
    newest = CheckpointStore(job.run.directory / "checkpoints", None).paths()[0]
    return load_file(newest / "tensors-00000.safetensors")


def assert_identical(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Assert equal names, and tensors equal bit for bit."""
    assert first.keys() == second.keys(), f"only in one: {sorted(first.keys() ^ second.keys())}"
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"differ: {different}"
