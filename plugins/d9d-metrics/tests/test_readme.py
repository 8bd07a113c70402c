"""The metric that the README writes keeps the contract of metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_metrics.confusion.config import ConfusionConfig
from d9d_testing.suites.metric import MetricSuite

README = Path(__file__).parents[1] / "README.md"


def hits() -> Any:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.M)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "README.md", "exec", dont_inherit=True), found)
    return found["Hits"](None)


@pytest.mark.thorough
class TestHits(MetricSuite):
    target = "hits"

    def build(self, *arguments: object, **fields: object) -> Any:
        return hits()


def test_it_counts_what_it_says() -> None:
    metric = hits()
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0], [9.0, 0.0]])
    metric.update({"class_logits": logits, "labels": torch.tensor([0, 0, 0, -100])})
    assert metric.compute()["hits"].item() == pytest.approx(2 / 3)
    assert metric.compute()["surest_mistake"].item() == pytest.approx(torch.tensor(3.0).sigmoid().item(), rel=1e-6)


def test_the_table_of_fields_is_that_of_the_config() -> None:
    page = README.read_text().partition("## Confusion matrices")[2].partition("## AUROC")[0]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert rows == [name for name in ConfusionConfig.model_fields if name != "name"]
