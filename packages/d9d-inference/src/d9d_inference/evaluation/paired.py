"""Paired comparison of the mean losses of two models on the same samples.

The mean loss of a term is a ratio: sum of losses over sum of weights. With equal weights for two models, the difference
of their means is the ratio of summed differences to summed weights. The tokens of a sample depend on each other, so
each sample is a cluster. The standard error of the ratio is computed by linearisation (Cochran 1977, Sampling
Techniques, chapter 6): with differences d_i and weights w_i of n samples and D = sum d / sum w, the residuals
e_i = (d_i - D w_i) / mean(w) give var(D) = sum e_i^2 / (n (n - 1)). Pairing removes the variance between easy and hard
samples (Miller 2024, Adding Error Bars to Evals: clustered and paired standard errors). The interval is D +- t standard
errors, with the quantile t of Student's distribution with n - 1 degrees of freedom.

Shapes: n samples, T loss terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

Values = npt.NDArray[np.float64]
#: Smallest number of samples of a comparison; with fewer, the series for Student's quantile is too inaccurate.
_FEWEST = 5


@dataclass(frozen=True)
class Difference:
    """Paired difference of two models' mean losses on the same samples, with its confidence interval.

    Attributes:
        mean: mean loss of the first model minus the mean loss of the other; if it is below 0, the first model is
            better.
        standard_error: standard error of ``mean``.
        low, high: ends of the confidence interval.
        confidence: confidence level of the interval.
        samples: number of samples.
    """

    mean: float
    standard_error: float
    low: float
    high: float
    confidence: float
    samples: int

    @property
    def is_none(self) -> bool:
        """Whether the confidence interval contains zero, so that no difference was found."""
        return self.low <= 0 <= self.high


def compare(first: Values, other: Values, weights: Values, coefficients: Values, confidence: float) -> Difference:
    """Compare two models on paired samples; see the module's docstring.

    Args:
        first: [n, T] sums of each sample's loss terms under the first model.
        other: [n, T] sums of each sample's loss terms under the other model.
        weights: [n, T] weights, which do not depend on the model.
        coefficients: [T] coefficients of the terms in the loss.
        confidence: confidence level, such as 0.95.

    Raises:
        DataError: there are too few samples.
    """
    count = len(weights)
    if count < _FEWEST:
        raise DataError(f"two models cannot be compared on {count} samples; use at least {_FEWEST}")
    differences = first - other
    totals = weights.sum(axis=0)
    present = totals > 0  # a loss term whose weights are all zero contributes zero
    ratios = np.where(present, differences.sum(axis=0) / np.where(present, totals, 1.0), 0.0)  # [T]
    scale = np.where(present, coefficients * count / np.where(present, totals, 1.0), 0.0)  # [T]
    residuals = ((differences - ratios * weights) * scale).sum(axis=1)  # [n]
    mean = float((coefficients * ratios).sum())
    error = math.sqrt(float((residuals**2).sum()) / (count * (count - 1)))
    reach = quantile((1 + confidence) / 2, count - 1) * error
    return Difference(mean, error, mean - reach, mean + reach, confidence, count)


def quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, by a series (Abramowitz and Stegun 1964, 26.7.5); for at least 4 degrees of freedom."""
    z = NormalDist().inv_cdf(probability)
    terms = [
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    ]
    return z + math.fsum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))
