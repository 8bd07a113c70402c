"""Tests of the plugin's own behaviour; conformance.py holds the suites."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from d9d_core.tracker import RunInfo
from d9d_hello.config import CsvConfig, SmoothLMConfig
from d9d_hello.task import SmoothLM
from d9d_hello.tracker import CsvTracker


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary_per_target() -> None:
    task = SmoothLM(SmoothLMConfig(smoothing=0.3))
    microbatch = {"tokens": torch.zeros(2, 3, dtype=torch.int64), "targets": torch.tensor([[1, 2, -100], [0, 0, 4]])}
    loss = task.losses({"logits": torch.zeros(2, 3, 5)}, microbatch)["smooth"]
    torch.testing.assert_close(loss, torch.tensor(5 * math.log(5)))
    assert task.weights(microbatch)["smooth"] == 5


def test_the_file_is_cut_back_to_the_resumed_step(tmp_path: Path) -> None:
    def run(resumed_step: int) -> RunInfo:
        return RunInfo("run", tmp_path, "", {}, total_steps=4, resumed_step=resumed_step)

    tracker = CsvTracker(CsvConfig())
    for first, resumed_step in ((1, 0), (2, 1)):
        opened = tracker.open(run(resumed_step), None)
        for step in range(first, 4):
            opened.write(step, {"loss": step / 2})
        opened.close("stopped")
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("1")  # "12,loss,0.5" as truncated by a kill
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,series,value",
        "1,loss,0.5",
        "2,loss,1.0",
        "3,loss,1.5",
        "1",
    ]
