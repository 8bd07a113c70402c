"""The metric ``auroc`` equals scikit-learn within its bound."""

from __future__ import annotations

import pytest
import torch
from d9d_core.errors import JobError
from d9d_metrics.auroc.config import AurocConfig
from d9d_metrics.auroc.metric import Auroc
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

roc_auc_score = pytest.importorskip("sklearn.metrics").roc_auc_score


def measured(scores: Tensor, targets: Tensor, bins: int = 10000, kind: str = "probabilities") -> tuple[float, float]:
    metric = Auroc(AurocConfig.model_validate({"num_bins": bins, "scores": kind}))
    for part in (slice(0, 3), slice(3, None)):
        metric.update({"class_logits": scores[part], "labels": targets[part]})
    area, bound = metric.compute().values()
    return area.item(), bound.item()


@pytest.mark.thorough
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 1)), min_size=2, max_size=60),
    st.sampled_from([2, 3, 10, 100, 10000]),
)
def test_it_is_within_its_bound_of_the_exact_area(pairs: list[tuple[float, int]], bins: int) -> None:
    scores, targets = (torch.tensor(column) for column in zip(*pairs, strict=True))
    if len(targets.unique()) == 1:
        targets[0] = 1 - targets[0]
    area, bound = measured(scores, targets, bins)
    assert abs(area - roc_auc_score(targets, scores)) <= bound + 1e-12


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1)), min_size=2, max_size=60))
def test_it_is_exact_if_every_bin_holds_one_score(pairs: list[tuple[int, int]]) -> None:
    levels, targets = (torch.tensor(column) for column in zip(*pairs, strict=True))
    if len(targets.unique()) == 1:
        targets[0] = 1 - targets[0]
    scores = (levels + 0.5) / 21
    assert measured(scores, targets, 21)[0] == pytest.approx(roc_auc_score(targets, scores), abs=1e-12)


def test_the_bound_shrinks_with_the_bins() -> None:
    scores = torch.linspace(0, 1, 2000)
    targets = (torch.rand(2000, generator=torch.Generator().manual_seed(1)) < scores).long()
    bounds = [measured(scores, targets, bins)[1] for bins in (10, 100, 1000)]
    assert bounds[0] > 5 * bounds[1] > 25 * bounds[2] > 0


def test_it_reads_the_named_observations() -> None:
    config = AurocConfig(predictions="scores_of_margin", targets="above", series="area")
    assert config.reads == {"scores_of_margin", "above"}
    metric = Auroc(config)
    targets = torch.tensor([0, 1, 0, 1])
    metric.update({"scores_of_margin": targets * 2.0 - 1, "class_logits": -targets * 1.0, "above": targets})
    assert metric.compute()["area"] == 1


def test_logits_rank_as_their_probabilities() -> None:
    logits, targets = torch.tensor([-2.0, 0.3, 1.0, 0.1]), torch.tensor([0, 1, 1, 0])
    pair = torch.stack([torch.zeros(4), logits], 1)
    assert measured(logits, targets, kind="logits") == measured(pair, targets, kind="logits")
    assert measured(logits, targets, kind="logits")[0] == 1


@pytest.mark.parametrize("label", [0, 1])
def test_with_one_class_only_there_is_no_area(label: int) -> None:
    area, _ = measured(torch.rand(5), torch.full((5,), label))
    assert torch.tensor(area).isnan()


def test_nan_scores_and_labels_that_are_no_class_are_noticed() -> None:
    scores, targets = torch.tensor([0.1, 0.9, torch.nan, 0.4]), torch.tensor([0, 1, 1, 0])
    assert torch.tensor(measured(scores, targets)[0]).isnan()
    assert torch.tensor(measured(scores.nan_to_num(0), targets + 1)[0]).isnan()
    targets[2] = -100  # does not count
    assert measured(scores, targets)[0] == 1


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(JobError, match=r"'class_logits' of shape \[3, 5\] and 'labels' of shape \[3\] do not fit"):
        measured(torch.zeros(3, 5), torch.zeros(3))


def test_pairs_in_a_bin_count_half_and_are_the_bound() -> None:
    # Bins of a quarter: positives 2, 0, 1, 1; negatives 1, 2, 0, 1.
    scores = torch.tensor([0.0, 0.24, 0.5, 1.0, 0.1, 0.25, 0.49, 0.75])
    targets = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
    area, bound = measured(scores, targets, 4)
    # Of 16 pairs, the negative in the first bin is below 2, both negatives in the second bin are below 2,
    # and 3 are ties.
    assert (area, bound) == ((2 + 4 + 3 / 2) / 16, 3 / 2 / 16)


def test_labels_that_are_no_class_make_the_area_nan_and_ignored_ones_do_not() -> None:
    scores, targets = torch.tensor([0.2, 0.8, 0.5]), torch.tensor([0, 1, 2])
    assert torch.tensor(measured(scores, targets)[0]).isnan()
    assert torch.tensor(measured(scores, torch.tensor([0, 1, -1]))[0]).isnan()
    assert measured(scores, torch.tensor([0, 1, -100]))[0] == 1
