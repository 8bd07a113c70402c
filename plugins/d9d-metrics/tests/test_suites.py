"""Every metric of the package passes the conformance suite of metrics, in every form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_testing.suites.metric import MetricSuite
from torch import Tensor

CLASSES = 5


class Suite(MetricSuite):
    plugin = "d9d_metrics.plugin"


@pytest.mark.full
class TestSum(Suite):
    target = "sum"
    config = {"values": "token_loss"}


@pytest.mark.thorough
class TestMean(Suite):
    target = "mean"
    config = {"values": "token_loss", "mask": "targets"}


@pytest.mark.full
class TestMeanOfAll(Suite):
    target = "mean"
    config = {"values": "absolute", "series": "error"}


@pytest.mark.thorough
class TestWeightedMean(Suite):
    target = "weighted_mean"
    config = {"values": "token_loss", "weights": "weights"}


@pytest.mark.full
class TestMax(Suite):
    target = "max"
    config = {"values": "absolute"}


@pytest.mark.full
class TestMin(Suite):
    target = "min"
    config = {"values": "token_loss", "mask": "targets"}


@pytest.mark.thorough
class TestTokenAccuracy(Suite):
    target = "token_accuracy"


ALL = ["accuracy", "precision", "recall", "f1", "fbeta"]
AVERAGES = ["micro", "macro", "weighted", "per_class"]


@pytest.mark.thorough
class TestMulticlass(Suite):
    target = "confusion"
    config = {
        "problem": {"kind": "multiclass", "num_classes": CLASSES},
        "statistics": ALL,
        "averages": AVERAGES,
        "beta": 2.0,
    }


@pytest.mark.full
class TestTopK(Suite):
    target = "confusion"
    config = {"problem": {"kind": "multiclass", "num_classes": CLASSES, "top_k": 2}, "averages": ["micro"]}


class OfBits(Suite):
    def observations(self, samples: slice) -> Mapping[str, Tensor]:
        numbers = torch.arange(self.samples)[samples]
        labels = torch.where(numbers % 4 == 3, -100, (numbers * 5) % 3 % 2)
        return {"class_logits": (numbers * 1.7).sin().unsqueeze(1) * 3, "labels": labels}


@pytest.mark.full
class TestBinary(OfBits):
    target = "confusion"
    config = {"problem": {"kind": "binary", "threshold": 0.4}, "statistics": ALL, "beta": 0.5}


@pytest.mark.thorough
class TestAuroc(OfBits):
    target = "auroc"
    config = {"num_bins": 20}


@pytest.mark.full
class TestMultilabel(Suite):
    target = "confusion"
    config = {
        "problem": {"kind": "multilabel", "num_classes": 3},
        "statistics": ALL,
        "averages": AVERAGES,
        "beta": 1.5,
        "class_names": ["red", "green", "blue"],
        "prefix": "colours/",
    }

    def observations(self, samples: slice) -> Mapping[str, Tensor]:
        numbers = torch.arange(self.samples)[samples].unsqueeze(1) + torch.arange(3) * 7
        labels = torch.where(numbers % 5 == 3, -100, numbers % 2)
        return {"class_logits": (numbers * 1.3).cos(), "labels": labels}


class TestCompose(Suite):
    target = "compose"
    plugin = None
    config: Any = {
        "metrics": {
            "loss": {"name": "mean", "values": "token_loss", "mask": "targets"},
            "classes": {"name": "confusion", "problem": TestMulticlass.config["problem"], "averages": ["per_class"]},
            "largest": {"name": "max", "values": "absolute"},
        }
    }
