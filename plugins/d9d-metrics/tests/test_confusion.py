"""Metric ``confusion``: fields, statistics of the user's functions, and refusals."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_metrics.confusion.config import ConfusionConfig
from d9d_metrics.confusion.counting import count_classes
from d9d_metrics.confusion.metric import ConfusionMetric
from d9d_metrics.confusion.statistics import macro, weighted
from pydantic import ValidationError
from torch import Tensor

THREE = {"kind": "multiclass", "num_classes": 3}
SCORES = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]])
TARGETS = torch.tensor([0, 1, 1, -100])


def of(predictions: Tensor, targets: Tensor, **fields: Any) -> dict[str, Any]:
    metric = ConfusionMetric(ConfusionConfig.model_validate(fields))
    metric.update({"class_logits": predictions, "labels": targets})
    return dict(metric.compute())


def specificity(tp: Tensor, fp: Tensor, tn: Tensor, fn: Tensor) -> Tensor:
    return tn / (tn + fp)


@pytest.mark.parametrize(
    "targets",
    [
        TARGETS,
        TARGETS.unsqueeze(1),
        torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]]),
        TARGETS.reshape(2, 2),
    ],
    ids=["indices", "column", "one-hot", "of tokens"],
)
def test_targets_may_be_indices_or_one_hot(targets: Tensor) -> None:
    scores = SCORES.reshape(2, 2, 3) if targets.shape == (2, 2) else SCORES
    assert of(scores, targets, problem=THREE, averages=["micro"])["accuracy_micro"].item() == pytest.approx(2 / 3)


def test_predictions_may_be_classes() -> None:
    found = of(SCORES.argmax(-1), TARGETS, problem=THREE, averages=["micro"])
    assert found["accuracy_micro"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("samples", [1, 3])
def test_binary_scores_may_be_a_column_a_pair_or_neither(samples: int) -> None:
    logits, targets = torch.tensor([1.0, -1.0, 2.0])[:samples], torch.tensor([1, 0, 0])[:samples]
    pair = torch.stack([torch.zeros(samples), logits], 1)
    found = [
        of(scores, labels, problem={"kind": "binary"})["accuracy"].item()
        for scores in (logits, logits.unsqueeze(1), pair)
        for labels in (targets, targets.unsqueeze(1))
    ]
    assert found == [pytest.approx(1.0 if samples == 1 else 2 / 3)] * 6


def test_a_threshold_is_of_probabilities_and_strict() -> None:
    logits, targets = torch.tensor([0.0, 2.0]), torch.tensor([0, 0])
    assert of(logits, targets, problem="binary")["accuracy"] == 0.5  # 0.5 is not more than 0.5
    strict = {"kind": "binary", "threshold": 0.95}
    assert of(logits, targets, problem=strict)["accuracy"] == 1
    assert of(logits, targets, problem=strict, scores="probabilities")["accuracy"] == 0.5


def test_a_function_of_ones_own_gets_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mine", type("Mine", (), {"specificity": specificity}))
    own: dict[str, Any] = {"statistics": ["function"], "function": "mine:specificity"}
    found = of(SCORES, TARGETS, problem=THREE, averages=["per_class", "micro"], class_names=["a", "b", "c"], **own)
    assert found["specificity"].names == ("a", "b", "c")
    assert found["specificity"].values.tolist() == [1.0, 1.0, pytest.approx(2 / 3)]
    assert found["specificity_micro"].item() == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("nowhere:f", "nowhere:f cannot be imported: ModuleNotFoundError"),
        ("math:pi", "math:pi is a float; name a function of"),
        ("math:fsum", "math:fsum raised TypeError"),
        ("builtins:print", "builtins:print returned NoneType; return a tensor of the counts' shape, [3]"),
    ],
)
def test_a_function_that_does_not_work_is_named(function: str, text: str) -> None:
    with pytest.raises(JobError, match=re.escape(text)):
        of(SCORES, TARGETS, problem=THREE, statistics=["function"], function=function, averages=["per_class"])


def test_a_target_that_is_no_class_makes_every_value_nan() -> None:
    for targets in (torch.tensor([0, 1, 1, 3]), torch.tensor([0, 1, 1, -1])):
        found = of(SCORES, targets, problem=THREE, averages=["micro", "macro"])
        assert all(value.isnan() for value in found.values())
    assert of(torch.zeros(2), torch.tensor([0, 2]), problem={"kind": "binary"})["accuracy"].isnan()


def test_without_samples_there_is_no_number() -> None:
    found = of(SCORES, torch.full((4,), -100), problem=THREE, averages=["micro", "macro", "weighted"])
    assert all(value.isnan() for value in found.values())


def test_counts_stay_exact_where_float32_stops() -> None:
    metric = ConfusionMetric(ConfusionConfig.model_validate({"problem": {"kind": "binary"}}))
    state = {name: tensor + (1 << 24 if name != "outside" else 0) for name, tensor in metric.state().items()}
    metric.load_state(state)
    metric.update({"class_logits": torch.ones(1), "labels": torch.ones(1, dtype=torch.int64)})
    assert metric.state()["hits"].item() == (1 << 24) + 1


@pytest.mark.parametrize(
    ("problem", "predictions", "targets", "text"),
    [
        (THREE, (4, 5), (4,), "'class_logits' of shape [4, 5] and 'labels' of shape [4] do not fit"),
        (THREE, (4, 3), (5,), "give scores [..., 3], and targets [...]"),
        (THREE, (), (), "do not fit"),
        ({"kind": "binary"}, (4, 3), (4,), "give scores [...], [..., 1] or [..., 2]"),
        ({"kind": "multilabel", "num_classes": 3}, (4, 3), (4,), "give both as [..., 3]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(problem: Any, predictions: Any, targets: Any, text: str) -> None:
    with pytest.raises(JobError, match=re.escape(text)):
        of(torch.zeros(predictions), torch.zeros(targets, dtype=torch.int64), problem=problem)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"statistics": []}, "the list is empty"),
        ({"statistics": ["fbeta"]}, "the statistic 'fbeta' needs the field 'beta'"),
        ({"beta": 2.0}, "'beta' has no effect"),
        ({"statistics": ["function"]}, "needs the field 'function'"),
        ({"statistics": ["function"], "function": "mine"}, "write package.module:function"),
        ({"class_names": ["a", "b"]}, "class_names has 2 different names for 3 classes"),
        ({"problem": {"kind": "binary"}, "averages": ["macro"]}, "nothing to average"),
        (
            {"problem": {"kind": "multiclass", "num_classes": 3, "top_k": 3}},
            "3 is not below the number of classes, 3",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(text)):
        ConfusionConfig.model_validate({"problem": THREE, **fields})


def test_a_target_among_the_highest_scores_counts_as_predicted() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 2.0, 1.0], [1.0, 1.0, 1.0], [9.0, 0.0, 0.0]])
    targets = torch.tensor([1, 0, 1, 2, -100])
    one, two = (count_classes(scores, targets, 3, top_k) for top_k in (1, 2))
    assert one["hits"].tolist() == [0, 0, 0]
    assert two["hits"].tolist() == [0, 2, 0]
    assert two["predicted"].tolist() == [1, 2, 1]
    assert one["actual"].tolist() == two["actual"].tolist() == [1, 2, 1]


def test_a_weighted_mean_has_any_scale_of_weights_and_leaves_out_what_has_no_value() -> None:
    values, kept = torch.tensor([1.0, 0.5, math.nan, 3.0]), torch.tensor([True, True, True, False])
    found = weighted(values, kept, torch.tensor([0.25, 0.5, 0.25, 9.0]))
    assert found.item() == pytest.approx((0.25 + 0.25) / 0.75)
    assert weighted(values, kept, torch.zeros(4)).item() == pytest.approx(0.75)
    assert macro(values, kept).item() == pytest.approx(0.75)
    assert macro(values, torch.zeros(4, dtype=torch.bool)).isnan()
