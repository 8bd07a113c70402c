"""Verdict of a comparison of two models."""

from __future__ import annotations

import pytest
from d9d_inference.evaluation.paired import Difference
from d9d_inference.evaluation.result import Evaluated, Report


def evaluated(name: str) -> Evaluated:
    return Evaluated(name, 3, {"a": {"loss": 2.0}}, {"a": 9}, {"a": {"load": [[1.0]]}})


@pytest.mark.parametrize(
    ("mean", "low", "high", "phrase", "better"),
    [
        (-1.0, -2.0, -0.5, "x is better", "first"),
        (1.0, 0.5, 2.0, "y is better", "other"),
        (1.0, 0.0, 2.0, "no difference found", None),
        (-1.0, -2.0, 0.0, "no difference found", None),
    ],
)
def test_a_comparison_says_which_model_is_better_if_the_interval_excludes_zero(
    mean: float, low: float, high: float, phrase: str, better: str | None
) -> None:
    report = Report(evaluated("x"), evaluated("y"), {"a": Difference(mean, 0.25, low, high, 0.95, 9)})
    assert report.verdict("a") == phrase
    values = report.to_json()
    assert values["model"] == "x"
    assert values["step"] == 3
    assert values["sets"] == {"a": {"samples": 9, "loss": 2.0, "load": [[1.0]]}}
    assert values["compare"]["other"] == {**evaluated("y").to_json()}
    assert values["compare"]["differences"]["a"] == {
        "loss_difference": mean, "standard_error": 0.25, "confidence_interval": [low, high], "confidence": 0.95,
        "samples": 9, "better": better,
    }  # fmt: skip
    assert "compare" not in Report(evaluated("x")).to_json()
