"""The metric ``confusion`` equals scikit-learn, in one shard and in several, some of them empty."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from d9d_core.metric import Vector
from d9d_metrics.confusion.config import ConfusionConfig
from d9d_metrics.confusion.metric import ConfusionMetric
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sk = pytest.importorskip("sklearn.metrics")
STATISTICS = ["accuracy", "precision", "recall", "f1", "fbeta"]
AVERAGES = ["micro", "macro", "weighted"]
ZERO = {"zero": 0, "one": 1, "nan": math.nan}
quickly = settings(max_examples=40)
pytestmark = pytest.mark.full


MERGE = {"sum": lambda t: t.sum(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}


def over_shards(make: Any, observations: Mapping[str, Tensor], ranks: int) -> dict[str, float]:
    """Values over samples that are dealt to ranks; there are more ranks than samples in small examples."""
    metrics = [make() for _ in range(ranks)]
    for index in range(len(next(iter(observations.values())))):
        metrics[index % ranks].update({name: tensor[index : index + 1] for name, tensor in observations.items()})
    states = [metric.state() for metric in metrics]
    merged = make()
    reductions = merged.reductions
    merged.load_state({name: MERGE[how](torch.stack([s[name] for s in states])) for name, how in reductions.items()})
    return numbers(merged.compute())


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Values by series, vectors included."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Vector):
            found |= {f"{name}/{label}": one for label, one in zip(value.names, value.values.tolist(), strict=True)}
        else:
            found[name] = value.item()
    return found


@st.composite
def classified(draw: st.DrawFn, least: int = 1) -> tuple[Tensor, Tensor, int]:
    """Scores [N, C] with ties, targets [N] that leave classes out, and C."""
    classes = draw(st.integers(2, 5))
    count = draw(st.integers(least, 25))
    occurring = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=classes, unique=True))
    targets = draw(st.lists(st.sampled_from(occurring), min_size=count, max_size=count))
    levels: Sequence[float] = draw(st.sampled_from([(0.0, 1.0), (-2.0, -1.0, 0.0, 0.5, 3.0), (1.0,)]))
    row = st.lists(st.sampled_from(levels), min_size=classes, max_size=classes)
    scores = draw(st.lists(row, min_size=count, max_size=count))
    return torch.tensor(scores), torch.tensor(targets), classes


def made(**fields: Any) -> Any:
    config = ConfusionConfig.model_validate({"statistics": STATISTICS, "beta": 2.0, **fields})
    return lambda: ConfusionMetric(config)


def expected(targets: Any, predicted: Any, zero: float, **how: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "precision": sk.precision_score(targets, predicted, zero_division=zero, **how),
            "recall": sk.recall_score(targets, predicted, zero_division=zero, **how),
            "f1": sk.f1_score(targets, predicted, zero_division=zero, **how),
            "fbeta": sk.fbeta_score(targets, predicted, beta=2.0, zero_division=zero, **how),
        }


def assert_equal(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, nan_ok=True, abs=1e-12), name


@quickly
@given(classified(), st.sampled_from(list(ZERO)), st.sampled_from([1, 4]))
def test_multiclass(example: tuple[Tensor, Tensor, int], zero: str, ranks: int) -> None:
    scores, targets, classes = example
    problem = {"kind": "multiclass", "num_classes": classes}
    make = made(problem=problem, averages=AVERAGES, zero_division=zero)
    found = over_shards(make, {"class_logits": scores, "labels": targets}, ranks)
    predicted = scores.argmax(-1).numpy()
    wanted: dict[str, float] = {}
    for average in AVERAGES:
        values = expected(targets.numpy(), predicted, ZERO[zero], average=average)
        wanted |= {f"{name}_{average}": value for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that occurs in predictions only
        balanced = sk.balanced_accuracy_score(targets, predicted)
    right = sk.accuracy_score(targets, predicted)
    assert_equal(found, wanted | {"accuracy_micro": right, "accuracy_weighted": right, "accuracy_macro": balanced})


@quickly
@given(classified(), st.sampled_from(["zero", "one"]))
def test_classes_one_by_one_absent_ones_too(example: tuple[Tensor, Tensor, int], zero: str) -> None:
    scores, targets, classes = example
    problem = {"kind": "multiclass", "num_classes": classes}
    make = made(problem=problem, averages=["per_class"], statistics=STATISTICS[1:], zero_division=zero)
    found = over_shards(make, {"class_logits": scores, "labels": targets}, 1)
    values = expected(targets.numpy(), scores.argmax(-1).numpy(), ZERO[zero], average=None, labels=range(classes))
    assert_equal(found, {f"{name}/{index}": v for name, of in values.items() for index, v in enumerate(of)})


@quickly
@given(classified(), st.integers(1, 4))
def test_top_k_is_a_hit_or_a_miss(example: tuple[Tensor, Tensor, int], top: int) -> None:
    scores, targets, classes = example
    top = min(top, classes - 1)
    scores = scores + torch.linspace(0, -0.01, classes)  # scikit-learn ranks ties the other way round
    problem = {"kind": "multiclass", "num_classes": classes, "top_k": top}
    make = made(problem=problem, averages=["micro"], statistics=["accuracy"], beta=None)
    found = over_shards(make, {"class_logits": scores, "labels": targets}, 4)
    if classes == 2:
        wanted = sk.accuracy_score(targets, scores.argmax(-1))
    else:
        wanted = sk.top_k_accuracy_score(targets, scores, k=top, labels=range(classes))
    assert_equal(found, {"accuracy_micro": wanted})


@quickly
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.50001, 0.9, 1.0]), st.integers(0, 1)), min_size=1),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.sampled_from(list(ZERO)),
    st.sampled_from([1, 4]),
)
def test_binary(pairs: list[tuple[float, int]], threshold: float, zero: str, ranks: int) -> None:
    scores, targets = (torch.tensor(column) for column in zip(*pairs, strict=True))
    problem = {"kind": "binary", "threshold": threshold}
    make = made(problem=problem, zero_division=zero, scores="probabilities")
    found = over_shards(make, {"class_logits": scores, "labels": targets}, ranks)
    predicted = (scores > threshold).long()
    wanted = expected(targets, predicted, ZERO[zero], average="binary")
    assert_equal(found, wanted | {"accuracy": sk.accuracy_score(targets, predicted)})


@quickly
@given(st.integers(0, 2**20), st.integers(1, 20), st.integers(2, 4), st.sampled_from(list(ZERO)))
def test_multilabel(seed: int, count: int, classes: int, zero: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    often = torch.rand(classes, generator=generator).round()  # some labels never occur
    targets = (torch.rand(count, classes, generator=generator) < often).long()
    scores = torch.rand(count, classes, generator=generator).mul(10).round() / 10
    problem = {"kind": "multilabel", "num_classes": classes, "threshold": 0.5}
    make = made(problem=problem, averages=AVERAGES, zero_division=zero, scores="probabilities")
    found = over_shards(make, {"class_logits": scores, "labels": targets}, 4)
    predicted = (scores > 0.5).long()
    wanted: dict[str, float] = {}
    for average in AVERAGES:
        values = expected(targets.numpy(), predicted.numpy(), ZERO[zero], average=average)
        wanted |= {f"{name}_{average}": value for name, value in values.items()}
    right = 1 - sk.hamming_loss(targets, predicted)
    found = {name: value for name, value in found.items() if name != "accuracy_weighted"}  # scikit-learn has none
    assert_equal(found, wanted | {"accuracy_micro": right, "accuracy_macro": right})
