"""Conformance suites of d9d-testing that this package passes; ``d9d plugins conform d9d-hello`` runs them."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from d9d_core.types import Microbatch
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.task import TaskSuite
from d9d_testing.suites.tracker import TrackerSuite
from torch import Tensor


class TestPlugin(PluginSuite):
    """Declarations of the package."""

    plugin = "d9d_hello.plugin"


class TestSmoothLM(TaskSuite):
    """Task ``smooth_lm``."""

    plugin = "d9d_hello.plugin"
    target = "smooth_lm"

    def outputs(self, microbatch: Microbatch, scale: Tensor) -> Mapping[str, Tensor]:
        """Logits [B, S, V] over 13 token ids, since the model gets no targets."""
        tokens = microbatch["tokens"].float()
        return {"logits": (tokens[..., None] * torch.arange(1.0, 14.0)).sin() * scale}


class TestCsv(TrackerSuite):
    """Tracker ``csv``."""

    plugin = "d9d_hello.plugin"
    target = "csv"

    def logged(self, directory: Path) -> Mapping[int, Mapping[str, float]]:
        """Values in the file of a run."""
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for step, series, value in list(csv.reader((directory / "metrics.csv").read_text().splitlines()))[1:]:
            found[int(step)][series] = float(value)
        return found
