"""What runs the actions of a pipeline that core does not run: sends, receives, split backwards and overlapped pairs."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.config.base import PluginConfig
from d9d_core.loop.executor import Executor, Handler, StepState
from d9d_core.loop.program import Action, Backward, InputBackward, Overlap, WeightBackward

from d9d_pipeline.overlap.handlers import overlapped
from d9d_pipeline.overlap.sending import has_points
from d9d_pipeline.split_backward import SplitBackward
from d9d_pipeline.transfers import Transfers


def handlers(config: PluginConfig, executor: Executor) -> Mapping[type[Action], Handler]:  # noqa: ARG001
    """The handlers of a rank, for any schedule. Collective over the ranks along ``pp``.

    Args:
        config: of the schedule.
        executor: whose stages run.
    """
    found: dict[type[Action], Handler] = {}
    if executor.pipeline.ranks > 1:
        found |= Transfers(executor).handlers()
    if InputBackward in executor.pipeline.kinds:
        split = SplitActions(executor)
        found |= {InputBackward: split.inputs, WeightBackward: split.weights}
    if Overlap not in executor.pipeline.kinds:
        return found
    if has_points(executor.stages.values()):
        return overlapped(executor, found)
    return found | {Overlap: OneAfterTheOther(executor, found).overlap}


class OneAfterTheOther:
    """The handler of overlapped pairs where nothing inside a stage is worth hiding.

    Args:
        executor: whose stages run.
        handlers: of split backwards.
    """

    def __init__(self, executor: Executor, handlers: Mapping[type[Action], Handler]) -> None:
        self._executor = executor
        self._backwards: Mapping[type[Action], Handler] = {Backward: executor.backward, **handlers}

    def overlap(self, action: Action, state: StepState) -> None:
        """Run the forward, then the backward."""
        assert isinstance(action, Overlap)
        self._executor.forward(action.forward, state)
        self._backwards[type(action.backward)](action.backward, state)


class SplitActions:
    """Handlers of split backwards.

    Args:
        executor: whose stages these are.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._stages = {
            index: SplitBackward(stage, executor.whole & {name for name, _ in stage.named_modules()})
            for index, stage in executor.stages.items()
        }

    def inputs(self, action: Action, state: StepState) -> None:
        """Compute the gradients of a stage's inputs, and hand them back."""
        assert isinstance(action, InputBackward)
        visit, gradients = self._executor.open_backward(action, state)
        leaves = [leaf for leaf in visit.leaves.values() if leaf.requires_grad]
        roots = list(visit.roots.values())
        weights = self._stages[action.stage].inputs(roots, gradients, leaves)
        state.weights[action.stage, action.microbatch] = weights.run
        self._executor.close_backward(action, visit, state)

    def weights(self, action: Action, state: StepState) -> None:
        """Compute the gradients of a stage's weights that are left."""
        assert isinstance(action, WeightBackward)
        state.weights.pop((action.stage, action.microbatch))()
        self._executor.gradients.after_weights(action.stage)
