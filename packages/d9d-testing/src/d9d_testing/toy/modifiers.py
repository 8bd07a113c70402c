"""Strategies, a fine-tuning method and a schedule for the toy model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from d9d_core.schedule import Backward, Program, Reduce, single_stage
from d9d_core.strategy import Applied, no_collectives
from d9d_core.traits import HasBlocks, modules_with
from d9d_engine.distributed.mesh import Topology
from torch import nn

from d9d_testing.toy.config import ToyPeftConfig, ToyPipelineStrategyConfig, ToyScheduleConfig, ToyStrategyConfig


class ToyStrategy:
    """Strategy that halves the outputs of the first blocks."""

    def __init__(self, config: ToyStrategyConfig | ToyPipelineStrategyConfig) -> None:
        self._blocks = getattr(config, "blocks", 1)

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:  # noqa: ARG002
        """Register a hook on each chosen block."""
        found = [item for model in modules_with(stage, HasBlocks).values() for item in model.blocks().items()]
        chosen = dict(islice(found, self._blocks))
        for block in chosen.values():
            block.register_forward_hook(lambda _module, _inputs, output: output * 0.5)
        return Applied(tuple(chosen), collectives=no_collectives)


class ToyPeft:
    """Fine-tuning method that trains the named parameters.

    Merging doubles the model's scale, so that tests can see it.
    """

    def __init__(self, config: ToyPeftConfig) -> None:
        self._trains = frozenset(config.trains)

    def inject(self, stage: nn.Module) -> frozenset[str]:  # noqa: ARG002
        """Return the trained parameters; nothing is injected."""
        return self._trains

    def merge(self, stage: nn.Module) -> None:
        """Set the model's buffer ``scale`` to 2."""
        for name, buffer in stage.named_buffers():
            if name == "scale":
                buffer.fill_(2.0)


class ToySchedule:
    """Single-stage schedule, possibly with missing actions."""

    def __init__(self, config: ToyScheduleConfig) -> None:
        self._forgets = {"nothing": (), "backward": (Backward,), "reduce": (Reduce,)}[config.forgets]

    def __call__(self, stages: int, microbatches: int) -> Sequence[Program]:
        """Program of the single stage."""
        (program,) = single_stage(stages, microbatches)
        return [tuple(action for action in program if not isinstance(action, self._forgets))]
