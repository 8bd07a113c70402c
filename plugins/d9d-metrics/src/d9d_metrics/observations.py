"""Observations of a task as metrics read them: found by name, aligned, and without what does not count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.config import closest
from d9d_core.errors import JobError
from torch import Tensor

#: Integer that marks what does not count, as in d9d's own tasks.
IGNORE = -100


def read(observations: Mapping[str, Tensor], name: str, metric: str) -> Tensor:
    """Read an observation.

    Args:
        observations: of a microbatch.
        name: of the observation.
        metric: name of the metric, for the message.

    Raises:
        JobError: the task observes something else.
    """
    if name not in observations:
        near = closest(name, observations)
        hint = f"did you mean '{near}'? " if near else ""
        has = ", ".join(sorted(observations)) or "nothing"
        raise JobError(f"metrics: {metric} reads '{name}', which the task does not observe; {hint}it observes: {has}")
    return observations[name]


def counted(mask: Tensor, values: Tensor, names: tuple[str, str], metric: str) -> Tensor:
    """Bool mask of the values that count, of their shape.

    Args:
        mask: bool, or integers of which -100 does not count; of the values' shape, or of its leading dims.
        values: any shape.
        names: of both observations, for the message.
        metric: name of the metric.

    Raises:
        JobError: the mask has another shape, or is of floating-point numbers.
    """
    if mask.is_floating_point():
        raise JobError(
            f"metrics: {metric}: the mask '{names[0]}' is {mask.dtype}; use bools, or integers of which {IGNORE} does "
            "not count"
        )
    return spread(mask if mask.dtype == torch.bool else mask != IGNORE, values, names, metric)


def spread(leading: Tensor, values: Tensor, names: tuple[str, str], metric: str) -> Tensor:
    """Spread a tensor of the values' leading dims over their other dims, as a view of their shape.

    Args:
        leading: to be spread.
        values: any shape.
        names: of both observations, for the message.
        metric: name of the metric.

    Raises:
        JobError: it has other dims.
    """
    if leading.shape != values.shape[: leading.ndim]:
        raise JobError(
            f"metrics: {metric}: '{names[0]}' of shape {list(leading.shape)} does not fit '{names[1]}' of shape "
            f"{list(values.shape)}; it must have the same shape, or the leading dims of it"
        )
    return leading.reshape(*leading.shape, *[1] * (values.ndim - leading.ndim)).expand_as(values)
