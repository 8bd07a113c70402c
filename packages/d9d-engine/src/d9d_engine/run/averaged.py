"""Weights of the model for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from d9d_core.protocols.optimizer import AveragesWeights, Optimizer

from d9d_engine.step.step import TrainStep


@contextmanager
def evaluation_weights(step: TrainStep) -> Iterator[None]:
    """Let the model hold the weights to evaluate inside the block, where the optimizer has others than it trains."""
    if not isinstance(step.optimizer, AveragesWeights):
        yield
        return
    step.before_update()  # a checkpoint may still be copying the parameters
    with step.optimizer.evaluation_weights():
        step.ties.copy_values()
        yield
    step.ties.copy_values()


def average_of(optimizer: Optimizer) -> dict[str, Any]:
    """Facts for a checkpoint's manifest: how its readers make the weights to evaluate, if they are not those saved."""
    if not isinstance(optimizer, AveragesWeights):
        return {}
    slot, weight = optimizer.average
    return {"average": {"slot": slot, "weight": weight}}
