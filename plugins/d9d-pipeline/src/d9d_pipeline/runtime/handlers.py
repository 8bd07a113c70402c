"""Handlers of the actions that d9d-engine does not run: sends, receives, split backwards and overlapped pairs."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.config import PluginConfig
from d9d_core.program.runner import Handler, StageRunner, StepState
from d9d_core.schedule import Action, Backward, Forward, InputBackward, Overlap, WeightBackward

from d9d_pipeline.overlap.handlers import overlap_handlers
from d9d_pipeline.overlap.yielding_dispatcher import has_yield_points
from d9d_pipeline.runtime.split_backward import SplitBackward
from d9d_pipeline.runtime.transfers import Transfers


def handlers(config: PluginConfig, runner: StageRunner) -> Mapping[type[Action], Handler]:  # noqa: ARG001
    """Make the handlers of all pipeline actions on a rank, for any schedule. Collective over the ranks along ``pp``.

    Args:
        config: config of the schedule.
        runner: interpreter of the stages.
    """
    found: dict[type[Action], Handler] = {Forward: runner.forward, Backward: runner.backward}
    if runner.pipeline.ranks > 1:
        found |= Transfers(runner).handlers()
    if InputBackward in runner.pipeline.kinds:
        split = SplitBackwardHandlers(runner)
        found |= split.handlers()
    if Overlap not in runner.pipeline.kinds:
        return found
    if has_yield_points(runner.stages.values()):
        return overlap_handlers(runner, found)
    return found | {Overlap: SequentialPairs(found).overlap}


class SequentialPairs:
    """Handler of overlapped pairs for stages without communication to hide.

    Args:
        handlers: handlers of all other actions.
    """

    def __init__(self, handlers: Mapping[type[Action], Handler]) -> None:
        self._handlers = handlers

    def overlap(self, action: Action, state: StepState) -> None:
        """Run the forward of a pair, then its backward."""
        assert isinstance(action, Overlap)
        for part in (action.forward, action.backward):
            self._handlers[type(part)](part, state)


class SplitBackwardHandlers:
    """Handlers of the computations of stages with split backwards.

    Args:
        runner: interpreter of the stages.
    """

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._stages = {
            index: SplitBackward(stage, runner.unsplittable & {name for name, _ in stage.named_modules()})
            for index, stage in runner.stages.items()
        }

    def handlers(self) -> dict[type[Action], Handler]:
        """Handler of each type of computation; ops defer weight gradients only in split backwards."""
        return {
            Forward: self.forward,
            Backward: self.backward,
            InputBackward: self.inputs,
            WeightBackward: self.weights,
        }

    def forward(self, action: Action, state: StepState) -> None:
        """Run a stage forward on a microbatch."""
        assert isinstance(action, Forward)
        self._stages[action.stage].expect(action.microbatch in state.split.get(action.stage, ()))
        self._runner.forward(action, state)

    def backward(self, action: Action, state: StepState) -> None:
        """Compute all gradients of a microbatch in a stage."""
        assert isinstance(action, Backward)
        # Ops do not defer, as in the forward of this microbatch, parts of which this backward may recompute.
        self._stages[action.stage].expect(False)
        self._runner.backward(action, state)

    def inputs(self, action: Action, state: StepState) -> None:
        """Compute the input gradients of a stage."""
        assert isinstance(action, InputBackward)
        self._stages[action.stage].expect(True)
        visit, gradients = self._runner.open_backward(action, state)
        roots, leaves = list(visit.roots.values()), list(visit.leaves.values())
        weights = self._stages[action.stage].inputs(roots, gradients, leaves)
        state.weights[action.stage, action.microbatch] = weights.run
        self._runner.close_backward(action, visit, state)

    def weights(self, action: Action, state: StepState) -> None:
        """Compute the deferred weight gradients of a stage."""
        assert isinstance(action, WeightBackward)
        self._stages[action.stage].expect(True)
        state.weights.pop((action.stage, action.microbatch))()
        self._runner.after_weights(action.stage)
