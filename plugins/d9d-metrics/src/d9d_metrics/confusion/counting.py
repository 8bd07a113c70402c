"""Counts of true and false positives and negatives of a microbatch, computed on the device.

Shapes: N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d9d_metrics.observations import IGNORE

#: Numbers of samples of a microbatch, int64. Per class [C]: ``hits`` (predicted rightly), ``predicted`` and ``actual``.
#: ``total``: samples that are counted, [C] or 0-d; ``outside``: samples that are not counted, because the target, or a
#: prediction that is given as an integer, is not a class, 0-d.
Counts = Mapping[str, Tensor]


def count_classes(predictions: Tensor, targets: Tensor, classes: int, top_k: int | None) -> Counts:
    """Count a multiclass problem.

    Of classes with equal scores, the class of the lowest index ranks highest, as in ``argmax``.

    Args:
        predictions: scores [N, C], or classes int64 [N].
        targets: int64 [N]; -100 to ignore a sample.
        classes: C.
        top_k: count a target as predicted if its score is among this many highest scores of the sample.
    """
    counts = targets != IGNORE
    valid = (targets >= 0) & (targets < classes)
    if predictions.ndim == 1:
        predicted = predictions
        valid &= (predicted >= 0) & (predicted < classes)
    else:
        predicted = predictions.argmax(-1)
        if top_k is not None:
            place = targets.clamp(0, classes - 1).unsqueeze(1)  # [N, 1]
            own = predictions.gather(1, place)
            before = torch.arange(classes, device=targets.device) < place
            rank = (~(predictions <= own) | ((predictions == own) & before)).sum(1)
            predicted = torch.where(rank < top_k, targets, predicted)
    # Ignored samples are counted in an extra class: removing them would make tensor sizes depend on values.
    predicted, actual = predicted.where(valid, classes), targets.where(valid, classes)
    return {
        "hits": _per_class(actual.where(predicted == actual, classes), classes),
        "predicted": _per_class(predicted, classes),
        "actual": _per_class(actual, classes),
        "total": valid.sum(),
        "outside": (counts & ~valid).sum(),
    }


def count_labels(probabilities: Tensor, targets: Tensor, threshold: float) -> Counts:
    """Count a binary or multilabel problem.

    Args:
        probabilities: [N, C].
        targets: int64 [N, C]: 0 or 1, or -100 to ignore a label.
        threshold: probability above which a label is predicted.
    """
    valid = (targets == 0) | (targets == 1)
    predicted, actual = (probabilities > threshold) & valid, targets == 1
    return {
        "hits": (predicted & actual).sum(0),
        "predicted": predicted.sum(0),
        "actual": actual.sum(0),
        "total": valid.sum(0),
        "outside": ((targets != IGNORE) & ~valid).sum(),
    }


def _per_class(classes_N: Tensor, classes: int) -> Tensor:
    """Number of samples of each class [C]; samples of the extra class C are left out."""
    none = torch.zeros(classes + 1, dtype=torch.int64, device=classes_N.device)
    return none.scatter_add_(0, classes_N, torch.ones_like(classes_N))[:classes]
