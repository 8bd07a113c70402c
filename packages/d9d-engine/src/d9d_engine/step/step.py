"""Training step, in the order of execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from d9d_core import events as ev
from d9d_core.elastic import Attempt
from d9d_core.optimizer import AveragesWeights, LrSchedule, Optimizer
from d9d_core.types import Pack

from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.ranges import OPTIMIZER, Ranges
from d9d_engine.step.auxiliary_losses import Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.clip import Clipper
from d9d_engine.step.elastic import SharedStep
from d9d_engine.step.executor import Executor
from d9d_engine.step.first_pass import FirstPassRunner
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.loss import LossScale
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.ownership import Ownership
from d9d_engine.step.replicas import Replicas
from d9d_engine.step.tied import Ties
from d9d_engine.subscribers.event_bus import Events


class TrainStep:
    """Training step: makes one optimizer step with the microbatches of all ranks. Never waits for the GPU.

    Args:
        task: counts tokens; notified of each step.
        first_pass: adds first-pass tensors that the loss needs, such as outputs of a frozen reference model.
        loss_scale: factor of each loss term.
        executor: runs forward and backward over all microbatches.
        gradients: finishes accumulation and reduction of gradients.
        clipper: computes the norm and the finiteness flag, and clips.
        statistics: metrics over each logging period.
        before_update: called before parameters change, as a checkpoint may still be copying them.
        optimizer: updates the parameters.
        replicas: replicas of the model that take their own steps, if any.
        shared: sums over elastic replicas, if any.
        ties: keeps copies of tied parameters equal.
        lr_schedule: step -> factor of the base learning rate.
        tallies: counts of the model's modules, to which some modules adapt.
        events: event bus of the subscribers.
        ranges: profiler ranges around the phases.
        mark: called at the beginning of a step, for CUDA graphs; see
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
        replicas: Replicas | None = None,
        shared: SharedStep | None = None,
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
        self.replicas = replicas or Replicas({}, Ownership({}), Topology())
        self.shared = shared

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Put the weights for evaluation into the model inside the block.

        These are the optimizer's evaluation weights, if it has such weights, or the mean of replicas that differ.
        """
        if not isinstance(self.optimizer, AveragesWeights) and not self.replicas.differ:
            yield
            return
        self.before_update()  # a checkpoint may still be copying the parameters
        own = self.optimizer.evaluation_weights() if isinstance(self.optimizer, AveragesWeights) else nullcontext()
        with own, self.replicas.equal():
            self.ties.copy_values()
            yield
        self.ties.copy_values()

    def __call__(self, step: int, pack: Pack, attempt: Attempt | None = None) -> ev.StepResult:
        """Run step ``step`` (0-based) on this rank's microbatches, which are on the device. Collective over all ranks.

        Args:
            step: number of the step.
            pack: microbatches of this rank.
            attempt: elastic replicas that share the microbatches; by default, this replica runs all of them.

        Raises:
            UndoneError: an elastic replica was lost; the state is as before, and the step must be repeated.
        """
        self.events.emit(ev.StepStarts(step, pack))
        self.task.begin_step(step)
        self.mark()  # CUDA graphs may overwrite outputs of the previous step

        self.events.emit(ev.ForwardBackwardStarts(step))
        self.statistics.begin()
        if attempt and self.shared:
            self.shared.begin()
        pack = self.first_pass(pack, step)
        scale = self.loss_scale.begin(pack)  # known before the first backward, so gradients need no scaling pass
        loss = self.executor.run(step, pack, scale, attempt.share(len(pack)) if attempt else None)
        self.events.emit(ev.ForwardBackwardEnds(step))

        with self.ranges("gradient reduction"):
            self.gradients.finish()  # finish reductions over ranks; each has exactly one owner
            if attempt and self.shared:
                loss = self.shared.settle(loss)  # sums over elastic replicas, or undoes the attempt
        loss = self.loss_scale.settle(loss, self.gradients)  # scales gradients if the task weighs outputs
        with self.ranges("clip"):
            result = self.clipper.clip(loss, sum(self.task.count(microbatch) for microbatch in pack))

        self.events.emit(ev.OptimizerStepStarts(step))
        self.before_update()
        with self.ranges(OPTIMIZER):
            self.optimizer.set_lr_factor(self.lr_schedule(step))  # a pure function of the step: nothing to save
            self.optimizer.step(result.finite)  # a non-finite step changes nothing, decided on the device
        self.replicas.after_update(step + 1)  # replicas that take their own steps may meet
        self.ties.copy_values()  # parameters in several stages, such as a tied embedding
        self.tallies.adapt(result.finite)  # updates buffers such as the bias that balances the load of experts
        self.events.emit(ev.OptimizerStepEnds(step))

        self.statistics.settle(result.finite)
        self.gradients.reset()
        self.events.emit(ev.StepEnds(step, result))
        return result


def constant_lr(step: int) -> float:  # noqa: ARG001 - a schedule takes the step
    """Default learning-rate schedule: the base learning rate at every step."""
    return 1.0
