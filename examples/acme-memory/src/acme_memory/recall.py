"""Metric and inference task ``recall``: targets that get more than half of the probability.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.inference import ROW, Columns
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from acme_memory.config import RecallConfig, RecallRowsConfig


def recalled(token_loss: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each position is recalled, and whether it is a target: bool [B, S], bool [B, S].

    Args:
        token_loss: float [B, S], in nats.
        targets: int64 [B, S], -100 where nothing is predicted.
    """
    counted = targets != -100
    return (token_loss < math.log(2)) & counted, counted


class Recall(AccumulatedMetric):
    """Share of recalled targets since the last reset, from the observations of the task ``causal_lm``."""

    def __init__(self, config: RecallConfig) -> None:  # noqa: ARG002 - no settings
        count = Accumulator("sum", dtype=torch.int64)
        super().__init__(recalled=count, targets=count)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Count the targets of one microbatch, on the device."""
        found, counted = recalled(observations["token_loss"], observations["targets"])
        self.accumulate(recalled=found.sum(), targets=counted.sum())

    def compute(self) -> Mapping[str, Tensor]:
        """Value of the series ``recall``; zero before the first target."""
        return {"recall": self["recalled"].double() / self["targets"].clamp(min=1)}


class RecallRows:
    """Inference task with one row per sample; sums over all rows give the share of the whole data."""

    columns: Mapping[str, str] = {
        ROW: "index of the sample",
        "recalled": "number of recalled targets",
        "targets": "number of targets",
    }

    def __init__(self, config: RecallRowsConfig) -> None:
        self._config = config

    def check(self, model: Any, facts: State) -> None:
        """Check nothing; the record requires a language model."""

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Model inputs, with the targets: then the model returns ``token_loss``."""
        names = ("positions", "documents", "lengths", "targets")
        shared = {name: microbatch[name] for name in names if name in microbatch}
        return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Counts [B] on the device."""
        found, counted = recalled(outputs["token_loss"], microbatch["targets"])
        return {"recalled": found.sum(-1), "targets": counted.sum(-1)}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """One row per sample, in host memory."""
        return {column: kept[column if column != ROW else "rows"].tolist() for column in self.columns}

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Sums over rows; d9d adds the sums of all parts and ranks."""
        return {name: float(sum(rows[name])) for name in ("recalled", "targets")}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Share of recalled targets in all samples."""
        return {"recall": sums["recalled"] / max(sums["targets"], 1.0)}
