"""Runs that are as long as their data: schedules and resumes know the number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_testing.logs import read_log


def job(tmp_path: Path, name: str, **sections: Any) -> Job:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 12)  # 528 bytes and an end
    values: dict[str, Any] = {
        "run": {"name": name, "dir": str(tmp_path / "runs")}, "epochs": 2, "device": "cpu", "batch": {"size": 8},
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        },
        "task": "causal_lm",
        "data": {"name": "text", "sources": [str(tmp_path / "text.txt")], "sequence_length": 16},
        "optimizer": {"name": "adamw", "lr": 1.0}, "lr_schedule": {"name": "cosine", "warmup_steps": 2},
        "trackers": [{"name": "jsonl", "picture": False}], "logging": {"every": 1}, "export": False, **sections,
    }  # fmt: skip
    return Job.from_values(values)


def lr(run: Job) -> list[float]:
    return [line["lr"] for line in read_log(run.run.directory)]


@pytest.mark.thorough
def test_the_schedule_ends_with_the_last_epoch_and_survives_a_resume(tmp_path: Path) -> None:
    whole = job(tmp_path, "whole")
    assert whole.build(lambda _: None).train().step == 8 + 1  # 33 samples an epoch: 66 in batches of 8
    assert lr(whole)[-1] == pytest.approx(0.1)  # the least that the schedule has
    parts = job(tmp_path, "parts")
    with parts.build(lambda _: None) as trainer:
        assert len(list(trainer.steps(4))) == 4
    parts.build(lambda _: None).train()
    assert lr(parts) == lr(whole)


def test_a_schedule_that_does_not_fit_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"the warm-up takes 10 steps, but the run has 9"):
        job(tmp_path, "x", lr_schedule={"name": "cosine", "warmup_steps": 10}).build(lambda _: None)
