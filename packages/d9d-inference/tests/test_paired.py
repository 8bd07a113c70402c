"""Comparison of two models on the same samples."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_inference.evaluation.paired import compare, quantile
from d9d_inference.evaluation.samples import SampleLosses

ONE = np.asarray([1.0])


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 4, 2.776445),
        (0.975, 10, 2.228139),
        (0.95, 30, 1.697261),
        (0.995, 120, 2.617421),
        (0.975, 10**6, 1.959966),
    ],
)
def test_quantiles_are_those_of_tables(probability: float, degrees: int, value: float) -> None:
    assert quantile(probability, degrees) == pytest.approx(value, rel=2e-3 if degrees < 10 else 2e-5)


@pytest.mark.parametrize("degrees", [1, 2, 10])
def test_quantiles_are_a_series_in_the_inverse_degrees_of_freedom(degrees: int) -> None:
    # For the normal quantile 2.
    terms = (2.0, 10 / 4, 294 / 96, 1098 / 384, 169_950 / 92_160)
    found = quantile(NormalDist().cdf(2.0), degrees)
    assert found == pytest.approx(sum(term / degrees**power for power, term in enumerate(terms)), rel=1e-9)


def test_with_equal_weights_it_is_the_paired_t_interval() -> None:
    generator = np.random.default_rng(0)
    first, other = generator.normal(2, 1, (40, 1)), generator.normal(2, 1, (40, 1))
    differences = (first - other)[:, 0]
    found = compare(first * 3, other * 3, np.full((40, 1), 3.0), ONE, 0.95)
    assert found.mean == pytest.approx(differences.mean())
    assert found.standard_error == pytest.approx(differences.std(ddof=1) / math.sqrt(40))
    assert found.high - found.mean == pytest.approx(2.022691 * found.standard_error, rel=1e-5)
    assert found.samples == 40


def test_long_samples_count_by_their_tokens() -> None:
    weights = np.asarray([[1.0], [1.0], [1.0], [1.0], [96.0]])
    found = compare(weights * [[1], [1], [1], [1], [3]], weights * 2.0, weights, ONE, 0.95)
    assert found.mean == pytest.approx((-4 + 96) / 100)
    assert found.standard_error > 0


def test_terms_of_a_loss_are_weighted_by_their_coefficients() -> None:
    generator = np.random.default_rng(1)
    first, other, weights = generator.random((30, 2)), generator.random((30, 2)), np.ones((30, 2))
    weights[:, 1] = 0
    both = compare(first, other, weights, np.asarray([2.0, 5.0]), 0.9)
    single = compare(first[:, :1], other[:, :1], weights[:, :1], np.asarray([2.0]), 0.9)
    assert (both.mean, both.standard_error) == pytest.approx((single.mean, single.standard_error))
    assert both.mean == pytest.approx(2 * (first - other)[:, 0].mean())


def test_the_interval_holds_the_difference_as_often_as_it_says() -> None:
    """Of samples of different lengths, whose tokens depend on each other."""
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        lengths = generator.integers(1, 50, (60, 1)).astype(float)
        easy = generator.normal(3, 1, (60, 1))  # the same for both models
        gains = 0.1 + generator.normal(0, 0.3, (60, 1))
        found = compare((easy + gains) * lengths, easy * lengths, lengths, ONE, 0.95)
        held += found.low <= 0.1 <= found.high
    deviation = math.sqrt(400 * 0.95 * 0.05)
    assert abs(held - 380) < NormalDist().inv_cdf(0.999) * deviation + 4  # linearised intervals are a bit too short


def test_equal_models_have_no_difference() -> None:
    values = np.random.default_rng(3).random((10, 1))
    found = compare(values, values, np.ones((10, 1)), ONE, 0.95)
    assert (found.mean, found.low, found.high, found.is_none) == (0, 0, 0, True)


def losses(sums: list[float], weights: list[float] | None = None, rows: list[int] | None = None) -> SampleLosses:
    count = len(sums)
    return SampleLosses(
        np.asarray(rows or range(count)),
        np.asarray(sums)[:, None],
        np.asarray(weights or [1.0] * count)[:, None],
        {"cross_entropy": 1.0},
    )


def test_what_cannot_be_compared_is_refused() -> None:
    first = losses([1.0, 2.0, 3.0, 4.0, 5.0])
    assert first.difference(losses([1.0] * 5), "a").mean == pytest.approx(2)
    with pytest.raises(DataError, match="^a: the two models count different tokens in the same samples"):
        first.difference(losses([1.0] * 5, [2.0] * 5), "a")
    with pytest.raises(DataError, match="^a: the two models have different samples"):
        first.difference(losses([1.0] * 4), "a")
    with pytest.raises(DataError, match="^a: the two models have different samples"):
        first.difference(losses([1.0] * 5, rows=[0, 1, 2, 3, 9]), "a")
    with pytest.raises(DataError, match="^a: one of the models has a loss that is not finite"):
        first.difference(losses([math.nan] * 5), "a")
    with pytest.raises(DataError, match="cannot be compared on 3 samples; use at least 5"):
        losses([1.0] * 3).difference(losses([2.0] * 3), "a")
