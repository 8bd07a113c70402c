"""Metric ``confusion``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.metric import Vector
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_metrics.confusion.alignment import align_binary, align_classes, align_labels
from d9d_metrics.confusion.config import BinaryProblem, ConfusionConfig, MulticlassProblem, Statistic
from d9d_metrics.confusion.counting import Counts, count_classes, count_labels
from d9d_metrics.confusion.statistics import (
    Confusion,
    fbeta,
    macro,
    own_function,
    precision,
    rate,
    recall,
    weighted,
)
from d9d_metrics.observations import read

_ZERO_DIVISION = {"zero": 0.0, "one": 1.0, "nan": torch.nan}


class ConfusionMetric(AccumulatedMetric):
    """Metric of the confusion matrix of all samples since the last reset, with statistics as in scikit-learn.

    Counts are int64. Averages of a multiclass problem skip classes that neither occur nor are predicted; averages of a
    multilabel problem include all labels. A statistic with denominator zero has the value ``zero_division``. All values
    are NaN before the first sample. They also become NaN after a target or an integer prediction that is not a class,
    because raising an error would make the host wait for the GPU.

    Args:
        config: config of the metric.
    """

    def __init__(self, config: ConfusionConfig) -> None:
        problem = config.problem
        classes = 1 if isinstance(problem, BinaryProblem) else problem.num_classes
        long = torch.int64
        each = Accumulator(shape=(classes,), dtype=long)
        one = Accumulator(dtype=long)
        total = one if isinstance(problem, MulticlassProblem) else each
        super().__init__(hits=each, predicted=each, actual=each, total=total, outside=one)
        self.config = config
        self._names = config.class_names or tuple(map(str, range(classes)))
        self._own = None if config.function is None else own_function(config.function)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Count one microbatch.

        Raises:
            JobError: an observation is missing, or shapes do not fit.
        """
        config = self.config
        names = (config.predictions, config.targets)
        predictions, targets = (read(observations, name, config.name).detach() for name in names)
        self.accumulate(**self._counts(predictions, targets, names))

    def _counts(self, predictions: Tensor, targets: Tensor, names: tuple[str, str]) -> Counts:
        problem, scores = self.config.problem, self.config.scores
        if isinstance(problem, MulticlassProblem):
            aligned = align_classes(predictions, targets, problem.num_classes, names)
            return count_classes(*aligned, problem.num_classes, problem.top_k)
        if isinstance(problem, BinaryProblem):
            probabilities, one = align_binary(predictions, targets, scores, names)
            return count_labels(probabilities.unsqueeze(1), one.unsqueeze(1), problem.threshold)
        return count_labels(*align_labels(predictions, targets, problem.num_classes, scores, names), problem.threshold)

    def compute(self) -> Mapping[str, Tensor | Vector]:
        """Series ``<statistic>`` of a binary problem; else ``<statistic>_<average>`` and ``<statistic>/<class>``."""
        hits, predicted, actual = (
            self[name].to(wide_dtype(self[name].device)) for name in ("hits", "predicted", "actual")
        )
        counts = Confusion(hits, predicted - hits, self["total"] - predicted - actual + hits, actual - hits)
        # ``known`` is added to every value: NaN before the first sample or after an invalid class, else zero.
        known = torch.where((self["outside"] > 0) | (self["total"].sum() == 0), torch.nan, 0.0)
        values: dict[str, Tensor | Vector] = {}
        for statistic in self.config.statistics:
            values |= self._averages(statistic, counts, known)
        return {f"{self.config.prefix}{name}": value for name, value in values.items()}

    def _averages(self, statistic: Statistic, counts: Confusion, known: Tensor) -> dict[str, Tensor | Vector]:
        config, function = self.config, self._function(statistic)
        name = statistic
        if statistic == "function":
            name = cast("Statistic", str(config.function).rpartition(":")[2].rpartition(".")[2])
        each = function(counts) + known  # [C]
        if isinstance(config.problem, BinaryProblem):
            return {name: each.squeeze(0)}
        actual = counts.tp + counts.fn
        kept = torch.ones_like(actual, dtype=torch.bool)
        if isinstance(config.problem, MulticlassProblem):
            kept = actual > 0 if statistic == "accuracy" else actual + counts.fp > 0
        found: dict[str, Tensor | Vector] = {}
        for average in config.averages or ("macro",):
            if average == "per_class":
                found[name] = Vector(each, self._names)
            elif average == "micro":
                found[f"{name}_micro"] = function(counts.pooled()) + known
            elif average == "macro":
                found[f"{name}_macro"] = macro(each, kept)
            else:
                found[f"{name}_weighted"] = weighted(each, kept, actual)
        return found

    def _function(self, statistic: Statistic) -> Callable[[Confusion], Tensor]:
        config, otherwise = self.config, _ZERO_DIVISION[self.config.zero_division]
        if self._own is not None and statistic == "function":
            return self._own
        if statistic == "precision":
            return partial(precision, otherwise=otherwise)
        if statistic == "accuracy":
            # In a multiclass problem, true negatives do not count, so the accuracy of a class is its recall.
            share = recall if isinstance(config.problem, MulticlassProblem) else rate
            return partial(share, otherwise=otherwise)
        if statistic == "recall":
            return partial(recall, otherwise=otherwise)
        return partial(
            fbeta, otherwise=otherwise, beta=1.0 if statistic == "f1" or config.beta is None else config.beta
        )
