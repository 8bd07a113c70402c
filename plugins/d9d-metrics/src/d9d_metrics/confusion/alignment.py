"""Alignment of scores and targets: the same samples, in one dim. Shapes: N samples, C classes."""

from __future__ import annotations

from typing import Literal

import torch
from d9d_core.errors import JobError
from torch import Tensor

from d9d_metrics.observations import IGNORE

Names = tuple[str, str]


def misfit(predictions: Tensor, targets: Tensor, names: Names, wanted: str) -> JobError:
    """Make the error about predictions and targets whose shapes do not fit together."""
    return JobError(
        f"metrics: '{names[0]}' of shape {list(predictions.shape)} and '{names[1]}' of shape {list(targets.shape)} do "
        f"not fit; {wanted}"
    )


def align_classes(predictions: Tensor, targets: Tensor, classes: int, names: Names) -> tuple[Tensor, Tensor]:
    """Align predictions and targets of a multiclass problem.

    Args:
        predictions: scores [..., C], or integers of the targets' shape.
        targets: integers [...] or [..., 1]; or one-hot [..., C], where a row of zeros ignores the sample.
        classes: C.
        names: names of both observations, for the error message.

    Returns:
        Scores [N, C] or integers [N], and targets int64 [N], -100 for ignored samples.

    Raises:
        JobError: the shapes of predictions and targets do not fit together.
    """
    if not predictions.is_floating_point() and predictions.shape == targets.shape:
        return predictions.flatten().long(), targets.flatten().long()
    wanted = f"give scores [..., {classes}], and targets [...], [..., 1] or one-hot [..., {classes}]"
    if predictions.ndim == 0 or predictions.shape[-1] != classes:
        raise misfit(predictions, targets, names, wanted)
    return predictions.flatten(0, -2), _indices(predictions, targets, names, wanted)


def _indices(predictions: Tensor, targets: Tensor, names: Names, wanted: str) -> Tensor:
    """Classes int64 [N] from targets given as indices or one-hot."""
    if targets.shape == predictions.shape[:-1]:
        return targets.flatten().long()
    if targets.shape == (*predictions.shape[:-1], 1):
        return targets.flatten().long()
    if targets.shape == predictions.shape:
        rows = targets.flatten(0, -2)
        return rows.argmax(-1).masked_fill((rows <= 0).all(-1), IGNORE)
    raise misfit(predictions, targets, names, wanted)


def align_binary(
    predictions: Tensor, targets: Tensor, scores: Literal["logits", "probabilities"], names: Names
) -> tuple[Tensor, Tensor]:
    """Align predictions and targets of a binary problem.

    Args:
        predictions: scores [...], [..., 1], or [..., 2] of the negative and the positive class.
        targets: 0 or 1, or -100 to ignore a sample, [...] or [..., 1].
        scores: kind of the scores.
        names: names of both observations, for the error message.

    Returns:
        Probabilities of the positive class [N], float32 or wider, and targets int64 [N], -100 for ignored samples.

    Raises:
        JobError: the shapes of predictions and targets do not fit together.
    """
    wanted = "give scores [...], [..., 1] or [..., 2], and targets of 0 and 1, [...] or [..., 1]"
    wide = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    shape, one = predictions.shape, targets
    # Whole shapes are compared: a last dim of 1 may also be the dim of samples, in a microbatch of one sample.
    if shape == (*targets.shape[:-1], 2) and targets.shape[-1:] == (1,):
        one = targets.squeeze(-1)
    if shape == targets.shape:
        own = wide
    elif shape == (*one.shape, 1):
        own = wide.squeeze(-1)
    elif shape == (*one.shape, 2):
        own = wide[..., 1] - wide[..., 0] if scores == "logits" else wide[..., 1]
    elif targets.shape == (*shape, 1):
        own = wide
    else:
        raise misfit(predictions, targets, names, wanted)
    logits = scores == "logits" and predictions.is_floating_point()  # integers are 0 or 1
    return (own.sigmoid() if logits else own).flatten(), targets.flatten().long()


def align_labels(
    predictions: Tensor, targets: Tensor, classes: int, scores: Literal["logits", "probabilities"], names: Names
) -> tuple[Tensor, Tensor]:
    """Align predictions and targets of a multilabel problem: probabilities and targets int64, both [N, C].

    Args:
        predictions: scores [..., C].
        targets: 0 or 1, or -100 to ignore a label, [..., C].
        classes: C.
        scores: kind of the scores.
        names: names of both observations, for the error message.

    Raises:
        JobError: the shapes of predictions and targets do not fit together.
    """
    if predictions.shape != targets.shape or predictions.ndim == 0 or predictions.shape[-1] != classes:
        raise misfit(predictions, targets, names, f"give both as [..., {classes}], a column for each label")
    wide = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    logits = scores == "logits" and predictions.is_floating_point()
    return (wide.sigmoid() if logits else wide).flatten(0, -2), targets.flatten(0, -2).long()
