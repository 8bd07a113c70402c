"""Conformance suites of d9d-testing that this package passes; ``d9d plugins conform acme-memory`` runs them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from d9d_core.types import Microbatch
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.inference.task import InferenceTaskSuite
from d9d_testing.suites.inference.writer import WriterSuite
from d9d_testing.suites.metric import MetricSuite
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from torch import Tensor

_PLUGIN = "acme_memory.plugin"


class TestPlugin(PluginSuite):
    """Declarations of the package."""

    plugin = _PLUGIN
    builds_on = ("d9d_nn.plugin",)  # declares the capability model:causal_lm


class TestCopying(DatasetSuite):
    """Dataset ``copying``."""

    plugin = _PLUGIN
    target = "copying"
    config = {"samples": 21}
    other = {"symbols": 5}


class TestNgram(ModelSuite):
    """Model ``ngram``, which has no residual stream."""

    plugin = _PLUGIN
    target = "ngram"
    depth_scaled = False


class TestRecall(MetricSuite):
    """Metric ``recall``."""

    plugin = _PLUGIN
    target = "recall"


class TestRecallRows(InferenceTaskSuite):
    """Inference task ``recall``."""

    plugin = _PLUGIN
    target = "recall"

    def case(self) -> tuple[Mapping[str, Tensor], Microbatch]:
        """Losses around the limit, with a position that is not predicted."""
        targets = torch.zeros(4, 3, dtype=torch.int64)
        targets[0, 2] = -100
        tokens = torch.zeros_like(targets)
        return {"token_loss": torch.linspace(0, 2, 12).view(4, 3)}, {
            "tokens": tokens,
            "targets": targets,
            "rows": torch.arange(4),
        }


class TestCsvWriter(WriterSuite):
    """Writer ``csv``."""

    plugin = _PLUGIN
    target = "csv"

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Rows of a file, in order."""
        with path.open(encoding="utf-8", newline="") as file:
            return [{name: json.loads(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
