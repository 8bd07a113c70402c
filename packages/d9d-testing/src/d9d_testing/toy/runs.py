"""Jobs over the toy plugin, and what their runs leave behind."""

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
    """Core's own records and the toy plugin's; a registry never changes."""
    return Registry.of(plugin)


def toy_job(directory: Path, *overrides: str, **sections: Any) -> Job:
    """Job of a toy run: twelve steps in milliseconds.

    Args:
        directory: gets the job file and the runs.
        overrides: ``section.field=value``.
        sections: replace or add sections of the job file.
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
        # A picture takes as long as the steps.
        "trackers": ["console", {"name": "jsonl", "picture": False}],
        "logging": {"every": 5},
        "checkpoint": {"every": 4},
        **sections,
    }
    path = directory / "job.json"
    path.write_text(json.dumps(values))
    return Job.load(path, registry=toy_registry(), overrides=overrides)


def quiet(job: Job) -> Trainer:
    """Build without notes."""
    return job.build(lambda _: None)


def noted(job: Job) -> tuple[Trainer, list[str]]:
    """Build, and collect the notes."""
    notes: list[str] = []
    return job.build(notes.append), notes


def metrics_of(job: Job) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return read_log(job.run.directory)


def final_tensors(job: Job) -> dict[str, Tensor]:
    """The tensors of the run's newest checkpoint."""
    newest = CheckpointStore(job.run.directory / "checkpoints", None).paths()[0]
    return load_file(newest / "tensors-00000.safetensors")


def assert_identical(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Same names, and every bit the same."""
    assert first.keys() == second.keys(), f"only in one: {sorted(first.keys() ^ second.keys())}"
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"differ: {different}"
