"""Sums, means, maxima, minima, token accuracy and compositions."""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.registry.loader import discover
from d9d_metrics.aggregate.metrics import Aggregate
from d9d_metrics.compose.metric import Compose
from d9d_metrics.token_accuracy.config import TokenAccuracyConfig
from d9d_metrics.token_accuracy.metric import TokenAccuracy
from d9d_testing.suites.support.component import build_component
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

VALUES = torch.tensor([[1.0, 2.0, 5.0], [4.0, -8.0, 6.0]])


def made(name: str, **fields: Any) -> Any:
    return build_component("metric", "d9d_metrics.plugin", name, fields)


def of(name: str, observations: dict[str, Tensor], **fields: Any) -> float:
    metric = made(name, values="v", **fields)
    assert isinstance(metric, Aggregate)
    metric.update(observations)
    (value,) = metric.compute().values()
    return value.item()


@pytest.mark.parametrize(
    ("name", "all_of_them", "masked"), [("sum", 10, 4), ("mean", 10 / 6, 1), ("max", 6, 6), ("min", -8, -8)]
)
def test_a_mask_leaves_values_out(name: str, all_of_them: float, masked: float) -> None:
    mask = torch.tensor([[-100, 3, -100], [3, 0, 7]])
    assert of(name, {"v": VALUES}) == pytest.approx(all_of_them)
    assert of(name, {"v": VALUES, "m": mask}, mask="m") == pytest.approx(masked)
    rows = torch.tensor([True, False])
    assert of(name, {"v": VALUES, "m": rows}, mask="m") == pytest.approx(of(name, {"v": VALUES[:1]}))


def test_what_is_masked_may_be_nan() -> None:
    values, mask = torch.tensor([1.0, torch.nan]), torch.tensor([True, False])
    for name, expected in (("sum", 1), ("mean", 1), ("max", 1), ("min", 1)):
        assert of(name, {"v": values, "m": mask}, mask="m") == expected
    assert of("weighted_mean", {"v": values, "w": torch.tensor([2.0, 0.0])}, weights="w") == 1


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), min_size=1, max_size=30))
def test_a_weighted_mean_is_that_of_python(pairs: list[tuple[float, float]]) -> None:
    values, weights = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    found = of("weighted_mean", {"v": values, "w": weights}, weights="w")
    if weights.sum() == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(fmean(values.tolist(), weights.tolist()), rel=1e-9, abs=1e-6)


def test_weights_of_samples_hold_for_all_their_values() -> None:
    assert of("weighted_mean", {"v": VALUES, "w": torch.tensor([1.0, 0.0])}, weights="w") == pytest.approx(8 / 3)


def test_sums_are_wider_than_what_is_observed() -> None:
    metric = made("sum", values="v")
    metric.update({"v": torch.tensor([2.0**24])})
    metric.update({"v": torch.tensor([1.0])})
    assert metric.compute()["sum_v"].item() == 2**24 + 1


@pytest.mark.parametrize(
    ("name", "fields", "observations", "text"),
    [
        (
            "mean",
            {},
            {"token_loss": VALUES},
            "mean needs 'v', which the task's observations() does not return; it returns: token_loss",
        ),
        ("mean", {"values": "tokenloss"}, {"token_loss": VALUES}, "did you mean 'token_loss'?"),
        (
            "sum",
            {"mask": "m"},
            {"v": VALUES, "m": torch.ones(3) > 0},
            "'m' of shape [3] does not fit 'v' of shape [2, 3]",
        ),
        ("sum", {"mask": "m"}, {"v": VALUES, "m": torch.ones(2)}, "the mask 'm' is torch.float32"),
        ("weighted_mean", {"weights": "w"}, {"v": VALUES, "w": torch.ones(3)}, "'w' of shape [3] does not fit"),
    ],
)
def test_what_does_not_fit_is_named(name: str, fields: Any, observations: dict[str, Tensor], text: str) -> None:
    with pytest.raises(JobError, match=re.escape(text)):
        made(name, **{"values": "v", **fields}).update(observations)


def test_token_accuracy_counts_ranks_below_k() -> None:
    metric = TokenAccuracy(TokenAccuracyConfig(top=(1, 3)))
    metric.update({"token_ranks": torch.tensor([[0, 2, -1], [5, 0, 3]])})
    assert {name: value.item() for name, value in metric.compute().items()} == {
        "token_accuracy_top_1": pytest.approx(2 / 5),
        "token_accuracy_top_3": pytest.approx(3 / 5),
    }
    other = TokenAccuracy(TokenAccuracyConfig(top=(1,), ranks="ranks_of_draft"))
    other.update({"token_ranks": torch.tensor([1]), "ranks_of_draft": torch.tensor([0])})
    assert other.compute()["token_accuracy_top_1"] == 1
    with pytest.raises(JobError, match="another head, and the task's observations\\(\\) returns: token_loss"):
        metric.update({"token_loss": VALUES})


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("token_accuracy", {"top": []}, "the list is empty"),
        ("token_accuracy", {"top": [1, 1]}, "a number is duplicate"),
        ("compose", {"metrics": {}}, "metrics is empty; write names with metrics"),
    ],
)
def test_lists_without_anything_in_them_are_refused(name: str, fields: Any, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        made(name, **fields)


def test_a_composition_has_a_state_and_a_series_for_each_child() -> None:
    fields = {"metrics": {"a": {"name": "sum", "values": "v"}, "b": {"name": "mean", "values": "v", "series": "m"}}}
    metric: Compose = build_component("metric", None, "compose", fields)
    metric.update({"v": VALUES})
    assert metric.state().keys() == {"a.total", "b.total", "b.count"}
    assert {name: value.item() for name, value in metric.compute().items()} == {  # type: ignore[union-attr]
        "a/sum_v": 10,
        "b/m": pytest.approx(10 / 6),
    }


def test_a_composition_refuses_metrics_over_tallies() -> None:
    pytest.importorskip("d9d_moe")
    assert discover().find("metric", "router")
    with pytest.raises(JobError, match="compose.metrics.load: router reads tallies of modules"):
        build_component("metric", None, "compose", {"metrics": {"load": {"name": "router"}}})


def test_before_the_first_value_there_is_nothing_to_aggregate() -> None:
    nothing = {"v": torch.zeros(0)}
    assert of("sum", nothing) == 0
    assert math.isnan(of("mean", nothing))
    assert of("max", nothing) == -math.inf
    assert of("min", nothing) == math.inf
    hidden = {"v": VALUES, "m": torch.full((2,), -100)}
    assert [of(name, hidden, mask="m") for name in ("sum", "max", "min")] == [0, -math.inf, math.inf]
    assert math.isnan(of("mean", hidden, mask="m"))


def test_a_mask_and_weights_leave_out_what_either_leaves_out() -> None:
    observed = {"v": torch.tensor([1.0, 2.0, 4.0]), "w": torch.tensor([3.0, 1.0, 2.0]), "m": torch.tensor([1, 0, -100])}
    assert of("weighted_mean", observed, weights="w", mask="m") == pytest.approx((3 * 1 + 1 * 2) / 4)
    metric = made("weighted_mean", values="v", weights="w", mask="m", series="s")
    for _ in range(2):
        metric.update(observed)
    assert {name: value.item() for name, value in metric.state().items()} == {"total": 10.0, "weight": 8.0}
    assert list(metric.compute()) == ["s"]
    assert metric.config.reads == {"v", "w", "m"}
    assert made("max", values="v").config.reads == {"v"}


def test_a_composition_goes_on_from_the_state_of_its_children() -> None:
    fields = {"metrics": {"a": {"name": "sum", "values": "v"}, "b": {"name": "max", "values": "v"}}}
    first, second = (build_component("metric", None, "compose", fields) for _ in range(2))
    first.update({"v": torch.tensor([1.0, 5.0])})
    assert first.reductions == {"a.total": "sum", "b.largest": "max"}
    second.load_state(first.state())
    second.update({"v": torch.tensor([2.0])})
    assert {name: value.item() for name, value in second.compute().items()} == {"a/sum_v": 8, "b/max_v": 5}
    second.reset()
    assert {name: value.item() for name, value in second.compute().items()} == {"a/sum_v": 0, "b/max_v": -math.inf}


def test_ranks_below_zero_are_no_targets() -> None:
    metric = TokenAccuracy(TokenAccuracyConfig())
    metric.update({"token_ranks": torch.tensor([0, 1, 4, 5, -1, -100])})
    metric.update({"token_ranks": torch.tensor([0])})
    assert {name: value.item() for name, value in metric.compute().items()} == {
        "token_accuracy_top_1": pytest.approx(2 / 5), "token_accuracy_top_5": pytest.approx(4 / 5),
    }  # fmt: skip
    with pytest.raises(JobError, match="returns: nothing$"):
        metric.update({})
