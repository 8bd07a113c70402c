"""Statistics of counts, and averages over classes. Shapes: C classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError
from d9d_core.plugin import Ref
from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Confusion(NamedTuple):
    """Counts of true and false positives and negatives, in float64: [C], or 0-d if summed over all classes."""

    tp: Tensor
    fp: Tensor
    tn: Tensor
    fn: Tensor

    def pooled(self) -> Confusion:
        """Counts summed over all classes."""
        return Confusion(*(count.sum() for count in self))


def divide(numerator: Tensor, denominator: Tensor, otherwise: float) -> Tensor:
    """Quotient; ``otherwise`` where the denominator is zero."""
    return torch.where(denominator == 0, otherwise, numerator / denominator)


def rate(counts: Confusion, otherwise: float) -> Tensor:
    """Accuracy: fraction of right decisions, ``(tp + tn) / (tp + tn + fp + fn)``."""
    return divide(counts.tp + counts.tn, counts.tp + counts.tn + counts.fp + counts.fn, otherwise)


def precision(counts: Confusion, otherwise: float) -> Tensor:
    """Fraction of predicted positives that are right, ``tp / (tp + fp)``."""
    return divide(counts.tp, counts.tp + counts.fp, otherwise)


def recall(counts: Confusion, otherwise: float) -> Tensor:
    """Fraction of actual positives that are predicted, ``tp / (tp + fn)``."""
    return divide(counts.tp, counts.tp + counts.fn, otherwise)


def fbeta(counts: Confusion, otherwise: float, beta: float) -> Tensor:
    """Weighted harmonic mean of precision and recall, ``(1 + b^2) tp / ((1 + b^2) tp + b^2 fn + fp)``."""
    square = beta * beta
    hits = (1 + square) * counts.tp
    return divide(hits, hits + square * counts.fn + counts.fp, otherwise)


def own_function(path: str) -> Callable[[Confusion], Tensor]:
    """Load a user's function as a statistic of a confusion matrix.

    Args:
        path: ``package.module:function``.

    Raises:
        JobError: the function cannot be imported, or is not a function. The returned statistic raises a ``JobError``
            when it is called and the function raises, or does not return a tensor of the counts' shape.
    """
    try:
        function: Any = Ref(path).load()
    except FOREIGN_FAILURES as failure:
        raise JobError(
            f"metrics: confusion.function: {path} cannot be imported: {type(failure).__name__}: {failure}; write "
            "package.module:function, installed or in a directory of PYTHONPATH"
        ) from failure
    if not callable(function):
        raise JobError(
            f"metrics: confusion.function: {path} is a {type(function).__name__}; name a function of (tp, fp, tn, fn)"
        )

    def statistic(counts: Confusion) -> Tensor:
        try:
            found = function(*counts)
        except FOREIGN_FAILURES as failure:
            raise JobError(
                f"metrics: confusion.function: {path} raised {type(failure).__name__}: {failure}; it gets the tensors "
                f"(tp, fp, tn, fn) of shape {list(counts.tp.shape)}"
            ) from failure
        if not isinstance(found, Tensor) or found.shape != counts.tp.shape:
            kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise JobError(
                f"metrics: confusion.function: {path} returned {kind}; return a tensor of the counts' shape, "
                f"{list(counts.tp.shape)}"
            )
        return found

    return statistic


def macro(values: Tensor, kept: Tensor) -> Tensor:
    """Mean over the classes in the mask ``kept`` whose value is not NaN; NaN if there is no such class."""
    kept = kept & ~values.isnan()
    return values.where(kept, 0).sum() / kept.sum()


def weighted(values: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over classes in the mask ``kept`` whose value is not NaN; the plain mean if all weights are 0."""
    weights = weights.where(kept & ~values.isnan(), 0)
    total = weights.sum()
    return torch.where(total > 0, (values * weights).where(weights > 0, 0).sum() / total, macro(values, kept))
