"""Alignment of scores and targets, counts, and statistics of counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_metrics.confusion.alignment import align_binary, align_classes, align_labels
from d9d_metrics.confusion.config import ConfusionConfig
from d9d_metrics.confusion.counting import count_classes, count_labels
from d9d_metrics.confusion.metric import ConfusionMetric
from d9d_metrics.confusion.statistics import Confusion, divide, fbeta, own_function, precision, rate, recall
from d9d_metrics.observations import read
from torch import Tensor

NAMES = ("scores", "targets")
SCORES = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]]])  # [1, 2, 3]


@pytest.mark.parametrize(
    ("targets", "aligned"),
    [
        (torch.tensor([[2, -100]]), [2, -100]),
        (torch.tensor([[[2], [0]]]), [2, 0]),
        (torch.tensor([[[0, 0, 1], [0, 0, 0]]]), [2, -100]),
    ],
)
def test_targets_of_classes_are_indices_or_one_hot(targets: Tensor, aligned: list[int]) -> None:
    scores, found = align_classes(SCORES, targets, 3, NAMES)
    assert scores.shape == (2, 3)
    assert (found.dtype, found.tolist()) == (torch.int64, aligned)


def test_predicted_classes_are_aligned_as_they_are() -> None:
    predicted, targets = align_classes(torch.tensor([[1, 2]]), torch.tensor([[0, 2]]), 3, NAMES)
    assert (predicted.tolist(), targets.tolist()) == ([1, 2], [0, 2])


@pytest.mark.parametrize(("classes", "shape"), [(4, (1, 2)), (3, (2, 2)), (3, (1, 2, 2))])
def test_shapes_of_classes_that_do_not_fit_are_named(classes: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        JobError, match=r"'scores' of shape \[1, 2, 3\] and 'targets' of shape .* do not fit; give scores"
    ):
        align_classes(SCORES, torch.zeros(shape, dtype=torch.int64), classes, NAMES)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        ((3,), (3,)),
        ((3, 1), (3,)),
        ((3, 2), (3,)),
        ((3, 2), (3, 1)),
        ((3,), (3, 1)),
        ((3, 1), (3, 1)),
        ((1, 2), (1, 1)),
        ((2, 3, 2), (2, 3, 1)),
        ((2, 1, 2), (2, 1)),
        ((2, 3, 1), (2, 3)),
    ],
)
@pytest.mark.parametrize("scores", ["logits", "probabilities"])
def test_binary_scores_have_one_column_or_two(shape: tuple[int, ...], targets: tuple[int, ...], scores: Any) -> None:
    given = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, aligned = align_binary(given, torch.ones(targets, dtype=torch.int32), scores, NAMES)
    count = math.prod(targets)
    assert found.shape == aligned.shape == (count,)
    assert (found.dtype, aligned.dtype) == (torch.float64, torch.int64)
    flat = given.reshape(count, -1)
    if flat.shape[1] == 2:
        expected = flat.softmax(-1)[:, 1] if scores == "logits" else flat[:, 1]
    else:
        expected = flat[:, 0].sigmoid() if scores == "logits" else flat[:, 0]
    assert torch.allclose(found, expected)


def test_binary_decisions_stay_and_narrow_scores_are_widened() -> None:
    found, _ = align_binary(torch.tensor([0, 1]), torch.tensor([0, 1]), "logits", NAMES)
    assert (found.dtype, found.tolist()) == (torch.float32, [0.0, 1.0])
    wide, _ = align_binary(torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1]), "logits", NAMES)
    assert (wide.dtype, wide.tolist()) == (torch.float32, [0.5, 0.5])
    with pytest.raises(JobError, match="do not fit; give scores"):
        align_binary(torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64), "logits", NAMES)


def test_labels_have_a_column_each() -> None:
    scores, targets = torch.zeros(1, 2, 3), torch.tensor([[[1, 0, -100], [0, 0, 1]]])
    found, aligned = align_labels(scores, targets, 3, "logits", NAMES)
    assert (found.tolist(), aligned.tolist()) == ([[0.5] * 3] * 2, targets[0].tolist())
    assert align_labels(scores, targets, 3, "probabilities", NAMES)[0].tolist() == [[0.0] * 3] * 2
    assert align_labels(torch.ones_like(targets), targets, 3, "logits", NAMES)[0].tolist() == [[1.0] * 3] * 2
    for classes, shape in ((2, (1, 2, 3)), (3, (2, 3))):
        with pytest.raises(JobError, match="a column for each label"):
            align_labels(scores, torch.zeros(shape), classes, "logits", NAMES)


def test_classes_outside_are_counted_apart_and_ignored_ones_nowhere() -> None:
    predicted = torch.tensor([0, 1, 1, 2, 3, -1, 0, 0])
    targets = torch.tensor([0, 0, 1, 2, 0, 1, 3, -100])
    found = {name: count.tolist() for name, count in count_classes(predicted, targets, 3, None).items()}
    assert found == {"hits": [1, 1, 1], "predicted": [1, 2, 1], "actual": [2, 1, 1], "total": 4, "outside": 3}


def test_labels_above_the_threshold_are_predicted() -> None:
    probabilities = torch.tensor([[0.5, 0.6], [0.9, 0.9], [0.9, 0.1], [0.9, 0.9]])
    targets = torch.tensor([[1, 1], [0, -100], [1, 1], [2, 0]])
    found = {name: count.tolist() for name, count in count_labels(probabilities, targets, 0.5).items()}
    assert found == {"hits": [1, 1], "predicted": [2, 2], "actual": [2, 2], "total": [3, 3], "outside": 1}


COUNTS = Confusion(*(torch.tensor(values) for values in ([2.0, 0.0], [1.0, 0.0], [5.0, 0.0], [6.0, 0.0])))


def test_statistics_are_their_quotients_or_the_other_value() -> None:
    assert rate(COUNTS, -1.0).tolist() == [0.5, -1.0]
    assert precision(COUNTS, -1.0).tolist() == [pytest.approx(2 / 3), -1.0]
    assert recall(COUNTS, -1.0).tolist() == [0.25, -1.0]
    for beta in (0.5, 1.0, 2.0):
        p, r, b = 2 / 3, 0.25, beta**2
        assert fbeta(COUNTS, -1.0, beta).tolist() == [pytest.approx((1 + b) * p * r / (b * p + r)), -1.0]
    assert [count.item() for count in COUNTS.pooled()] == [2.0, 1.0, 5.0, 6.0]
    assert divide(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), math.nan)[0] == 1.5


def test_a_users_function_is_a_statistic_of_the_counts_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("math.mine", lambda tp, fp, tn, fn: tp - fp + 10 * tn - 100 * fn, raising=False)
    assert own_function("math:mine")(COUNTS).tolist() == [2 - 1 + 50 - 600, 0]
    monkeypatch.setattr("math.short", lambda tp, *_: tp[0], raising=False)
    monkeypatch.setattr("math.number", lambda *_: 3, raising=False)
    monkeypatch.setattr("math.fails", lambda *_: 1 / 0, raising=False)
    for name, said in (
        ("short", r"a tensor of shape \[\]"),
        ("number", "returned int"),
        ("fails", "ZeroDivisionError"),
    ):
        with pytest.raises(JobError, match=said):
            own_function(f"math:{name}")(COUNTS)
    with pytest.raises(JobError, match="cannot be imported"):
        own_function("math:nothing")
    with pytest.raises(JobError, match="is a float; name a function of"):
        own_function("math:pi")


def test_a_macro_average_leaves_out_classes_that_a_statistic_says_nothing_of() -> None:
    """Class 2 is predicted once and never right: it has a precision, and no accuracy."""
    fields = {"problem": {"kind": "multiclass", "num_classes": 4}, "averages": ["macro"]}
    config = ConfusionConfig.model_validate(fields | {"statistics": ["accuracy", "precision"]})
    metric = ConfusionMetric(config)
    scores = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0]])
    metric.update({"class_logits": scores, "labels": torch.tensor([0, 1, 1])})
    found = {name.rpartition("/")[2]: value.item() for name, value in metric.compute().items()}  # type: ignore[union-attr]
    assert found == {"accuracy_macro": pytest.approx((1 + 0.5) / 2), "precision_macro": pytest.approx((1 + 1 + 0) / 3)}


def test_observations_that_are_missing_are_named_with_what_there_is() -> None:
    one = torch.ones(1)
    assert read({"b": one}, "b", "m") is one
    for observed, end in (
        (
            {"labels": one, "a": one},
            "'label', which the task's observations() does not return; did you mean 'labels'? it returns: a, labels",
        ),
        ({}, "'label', which the task's observations() does not return; it returns: nothing"),
    ):
        with pytest.raises(JobError) as error:
            read(observed, "label", "m")
        assert str(error.value) == f"metrics: m needs {end}"


def test_averages_are_weighted_by_what_occurs_and_undefined_statistics_have_a_value() -> None:
    def computed(zero_division: str, **fields: Any) -> dict[str, Any]:
        problem = {"kind": "multiclass", "num_classes": 3}
        averages = ["micro", "macro", "weighted", "per_class"]
        config = {"problem": problem, "statistics": ["precision"], "averages": averages, "prefix": "p/"}
        metric = ConfusionMetric(ConfusionConfig.model_validate({**config, "zero_division": zero_division, **fields}))
        # Class 0: 3 targets, 2 predicted, both right. Class 1: 1 target, 2 predicted, one right. Class 2: one target,
        # never predicted, so its precision has no denominator.
        metric.update({"class_logits": torch.tensor([0, 0, 1, 1, 1]), "labels": torch.tensor([0, 0, 0, 1, 2])})
        found = dict(metric.compute())
        each = found.pop("p/precision")
        assert each.names == (fields.get("class_names") or ("0", "1", "2"))  # type: ignore[union-attr]
        return {name: value.item() for name, value in found.items()} | {"each": each.values.tolist()}  # type: ignore[union-attr]

    third = pytest.approx(1 / 3)
    assert computed("zero") == {
        "p/precision_micro": pytest.approx(3 / 5), "p/precision_macro": pytest.approx((1 + 1 / 3) / 3),
        "p/precision_weighted": pytest.approx((3 + 1 / 3) / 5), "each": [1.0, third, 0.0],
    }  # fmt: skip
    assert computed("one", class_names=("a", "b", "c")) == {
        "p/precision_micro": pytest.approx(3 / 5), "p/precision_macro": pytest.approx((1 + 1 / 3 + 1) / 3),
        "p/precision_weighted": pytest.approx((3 + 1 / 3 + 1) / 5), "each": [1.0, third, 1.0],
    }  # fmt: skip
    found = computed("nan")
    assert math.isnan(found.pop("each")[2])
    assert found == {
        "p/precision_micro": pytest.approx(3 / 5), "p/precision_macro": pytest.approx((1 + 1 / 3) / 2),
        "p/precision_weighted": pytest.approx((3 + 1 / 3) / 4),
    }  # fmt: skip


@pytest.mark.parametrize(("top_k", "hits"), [(1, [1, 1, 0]), (2, [1, 1, 1])])
def test_of_equal_scores_the_lower_class_ranks_higher(top_k: int, hits: list[int]) -> None:
    scores = torch.tensor([[2.0, 2.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 1.0], [5.0, 1.0, 5.0]])
    targets = torch.tensor([0, 1, 2, 2])
    counts = count_classes(scores, targets, 3, top_k)
    assert counts["hits"].tolist() == hits  # in the last sample, class 2 is second
    assert counts["actual"].tolist() == [1, 1, 2]


def test_the_best_k_of_a_problem_are_fewer_than_its_classes() -> None:
    problem = {"kind": "multiclass", "num_classes": 3}
    assert ConfusionConfig.model_validate({"problem": {**problem, "top_k": 2}}).problem.top_k == 2  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="3 is not below the number of classes, 3; choose a smaller number"):
        ConfusionConfig.model_validate({"problem": {**problem, "top_k": 3}})
    for names, count in ((("a", "b"), 2), (("a", "b", "a"), 2), (("a", "b", "c", "a"), 3)):
        with pytest.raises(ValueError, match=f"class_names has {count} different names for 3 classes"):
            ConfusionConfig.model_validate({"problem": problem, "class_names": names})
