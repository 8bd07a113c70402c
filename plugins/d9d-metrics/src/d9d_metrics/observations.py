"""Access to a task's observations for metrics: lookup by name, shape checks and masks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.config import closest
from d9d_core.errors import JobError
from torch import Tensor

#: Integer that marks ignored values, as in d9d's own tasks.
IGNORE = -100


def read(observations: Mapping[str, Tensor], name: str, metric: str) -> Tensor:
    """Read an observation.

    Args:
        observations: observations of a microbatch.
        name: name of the observation.
        metric: name of the metric, for the error message.

    Raises:
        JobError: the task has no such observation.
    """
    if name not in observations:
        near = closest(name, observations)
        hint = f"did you mean '{near}'? " if near else ""
        has = ", ".join(sorted(observations)) or "nothing"
        raise JobError(
            f"metrics: {metric} needs '{name}', which the task's observations() does not return; {hint}it "
            f"returns: {has}"
        )
    return observations[name]


def counted(mask: Tensor, values: Tensor, names: tuple[str, str], metric: str) -> Tensor:
    """Bool mask of the selected values, in their shape.

    Args:
        mask: bools, or integers that are -100 for ignored values; has the values' shape or its leading dims.
        values: any shape.
        names: names of both observations, for the error message.
        metric: name of the metric.

    Raises:
        JobError: the mask has another shape, or a floating-point dtype.
    """
    if mask.is_floating_point():
        raise JobError(
            f"metrics: {metric}: the mask '{names[0]}' is {mask.dtype}; use bools, or integers that are {IGNORE} for "
            "ignored values"
        )
    return spread(mask if mask.dtype == torch.bool else mask != IGNORE, values, names, metric)


def spread(leading: Tensor, values: Tensor, names: tuple[str, str], metric: str) -> Tensor:
    """Expand ``leading`` to the shape of ``values``, as a view; its shape must equal the first dims of ``values``.

    Args:
        leading: tensor to expand.
        values: any shape.
        names: names of both observations, for the error message.
        metric: name of the metric.

    Raises:
        JobError: the shape of the tensor is not the leading part of the values' shape.
    """
    if leading.shape != values.shape[: leading.ndim]:
        raise JobError(
            f"metrics: {metric}: '{names[0]}' of shape {list(leading.shape)} does not fit '{names[1]}' of shape "
            f"{list(values.shape)}; use the same shape or its leading dims"
        )
    return leading.reshape(*leading.shape, *[1] * (values.ndim - leading.ndim)).expand_as(values)
