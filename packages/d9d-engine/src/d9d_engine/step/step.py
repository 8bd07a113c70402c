"""Training step, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from d9d_core import events as ev
from d9d_core.optimizer import AveragesWeights, LrSchedule, Optimizer
from d9d_core.types import Pack

from d9d_engine.profiling.ranges import OPTIMIZER, Ranges
from d9d_engine.step.auxiliary_losses import Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.clip import Clipper
from d9d_engine.step.executor import Executor
from d9d_engine.step.first_pass import FirstPassRunner
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.loss import LossScale
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.tied import Ties
from d9d_engine.subscribers.event_bus import Events


class TrainStep:
    """Training step: takes one pack and makes one optimizer step. Never waits for the GPU.

    Args:
        task: counts tokens, and is told the step.
        first_pass: what the loss needs of a forward before, such as that of a frozen reference model.
        loss_scale: the global weight of each loss term.
        executor: forward and backward over all microbatches.
        gradients: makes gradients final.
        clipper: norm, clipping and the finiteness flag.
        statistics: metrics over each logging period.
        before_update: called before parameters change, while a checkpoint may still be copying them.
        optimizer: updates the parameters.
        ties: keeps the copies of a parameter on several stages equal.
        lr_schedule: step -> factor on the base learning rate.
        tallies: what the model's modules counted, which some adapt to.
        events: observers.
        ranges: around the phases, for a profiler.
        mark: called when a step begins, for recorded modules; see
            :func:`d9d_engine.compose.parts.cuda_graphs.step_mark`.
    """

    def __init__(
        self,
        task: CheckedTask,
        first_pass: FirstPassRunner,
        loss_scale: LossScale,
        executor: Executor,
        gradients: Gradients,
        clipper: Clipper,
        statistics: Statistics,
        before_update: Callable[[], None],
        optimizer: Optimizer,
        ties: Ties,
        lr_schedule: LrSchedule,
        tallies: Tallies,
        events: Events,
        ranges: Ranges | None = None,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = task
        self.first_pass = first_pass
        self.loss_scale = loss_scale
        self.executor = executor
        self.gradients = gradients
        self.clipper = clipper
        self.statistics = statistics
        self.before_update = before_update
        self.optimizer = optimizer
        self.ties = ties
        self.lr_schedule = lr_schedule
        self.tallies = tallies
        self.events = events
        self.ranges = ranges or Ranges()
        self.mark = mark

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Let the model hold the weights to evaluate inside the block, if the optimizer trains others."""
        if not isinstance(self.optimizer, AveragesWeights):
            yield
            return
        self.before_update()  # a checkpoint may still be copying the parameters
        with self.optimizer.evaluation_weights():
            self.ties.copy_values()
            yield
        self.ties.copy_values()

    def __call__(self, step: int, pack: Pack) -> ev.StepResult:
        """Run step ``step`` (0-based) on this rank's slice of a pack, on the device. Collective over all ranks."""
        self.events.emit(ev.StepStarts(step, pack))
        self.task.begin_step(step)
        self.mark()  # CUDA graphs may write over what they returned in the step before

        self.events.emit(ev.ForwardBackwardStarts(step))
        self.statistics.begin()
        pack = self.first_pass(pack, step)
        scale = self.loss_scale.begin(pack)  # known before the first backward, so gradients need no scaling pass
        loss = self.executor.run(step, pack, scale)
        self.events.emit(ev.ForwardBackwardEnds(step))

        with self.ranges("gradient reduction"):
            self.gradients.finish()  # reductions over ranks land; each has exactly one owner
        loss = self.loss_scale.settle(loss, self.gradients)  # for a task that weighs outputs, gradients are scaled now
        with self.ranges("clip"):
            result = self.clipper.clip(loss, sum(self.task.count(microbatch) for microbatch in pack))

        self.events.emit(ev.OptimizerStepStarts(step))
        self.before_update()
        with self.ranges(OPTIMIZER):
            self.optimizer.set_lr_factor(self.lr_schedule(step))  # a pure function of the step: nothing to save
            self.optimizer.step(result.finite)  # a non-finite step changes nothing, decided on the device
        self.ties.copy_values()  # what several stages share, such as a tied embedding
        self.tallies.adapt(result.finite)  # such as the bias that balances experts
        self.events.emit(ev.OptimizerStepEnds(step))

        self.statistics.settle(result.finite)
        self.gradients.reset()
        self.events.emit(ev.StepEnds(step, result))
        return result


def constant_lr(step: int) -> float:  # noqa: ARG001 - a schedule takes the step
    """Learning-rate schedule of a job that names none: the base learning rate at every step."""
    return 1.0
