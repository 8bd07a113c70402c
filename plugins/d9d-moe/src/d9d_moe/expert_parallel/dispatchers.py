"""Replacement of the dispatchers of a stage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from d9d_core.errors import BuildError
from d9d_core.tensors import is_dtensor
from d9d_core.traits import Dispatcher, HasExperts, modules_with
from torch import nn


def replace_dispatchers(
    stage: nn.Module, make: Callable[[int], Dispatcher], layers: Collection[str] | None = None
) -> tuple[str, ...]:
    """Replace the dispatchers of layers with experts, in place; layers with equally many experts share a dispatcher.

    Strategies at the anchor ``expert``, position ``after``, call it to replace the dispatchers of ``expert_parallel``.

    Args:
        stage: stage whose modules are searched.
        make: function that makes the dispatcher for a number of experts on all ranks.
        layers: qualified names of the layers to change, such as :func:`spread_layers`; by default all layers.

    Returns:
        Names of the layers; empty if the stage has no experts.
    """
    found = modules_with(stage, HasExperts)
    chosen = {name: layer for name, layer in found.items() if layers is None or name in layers}
    shared = cache(make)
    for layer in chosen.values():
        layer.dispatcher = shared(experts_of(layer))
    return tuple(chosen)


def spread_layers(stage: nn.Module) -> dict[str, HasExperts]:
    """Layers whose experts ``expert_parallel`` has sharded, by qualified name."""
    return {
        name: layer
        for name, layer in modules_with(stage, HasExperts).items()
        if any(is_dtensor(one) for bank in layer.expert_banks().values() for one in bank.parameters())
    }


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
