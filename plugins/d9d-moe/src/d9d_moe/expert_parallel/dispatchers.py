"""Replacement of the dispatchers of a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from d9d_core.errors import BuildError
from d9d_core.traits import Dispatcher, HasExperts, modules_with
from torch import nn


def replace_dispatchers(stage: nn.Module, make: Callable[[int], Dispatcher]) -> tuple[str, ...]:
    """Replace the dispatcher of every layer with experts, in place; layers with equally many experts share one.

    Strategies at the anchor ``expert``, position ``after``, call it to replace the dispatchers of ``expert_parallel``.

    Args:
        stage: stage whose modules are searched.
        make: function that makes the dispatcher for a number of experts on all ranks.

    Returns:
        Names of the layers; empty if the stage has no experts.
    """
    layers = modules_with(stage, HasExperts)
    shared = cache(make)
    for layer in layers.values():
        layer.dispatcher = shared(experts_of(layer))
    return tuple(layers)


def experts_of(layer: HasExperts) -> int:
    """Number of experts of a layer on all ranks.

    Raises:
        BuildError: the parameters have different numbers of experts.
    """
    sizes = {len(parameter) for bank in layer.expert_banks().values() for parameter in bank.parameters()}
    if len(sizes) != 1:
        raise BuildError(
            f"{type(layer).__name__} has parameters for different numbers of experts, {sorted(sizes)}; use one "
            "number, as dimension 0"
        )
    return sizes.pop()
