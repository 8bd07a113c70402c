"""One training step, top to bottom."""

from __future__ import annotations

import torch

from d9d_core.loop import events as ev
from d9d_core.loop.executor import Executor
from d9d_core.loop.gradients import Clipper, Gradients
from d9d_core.loop.loss import LossScale
from d9d_core.loop.statistics import Statistics
from d9d_core.protocols import LrSchedule, Optimizer, Pack
from d9d_core.state.random import derive_seed


class TrainStep:
    """Takes one pack and makes one optimizer step. Never waits for the GPU.

    Args:
        seed: the job's seed; each step draws from a generator of its own number.
        loss_scale: the global weight of each loss term.
        executor: forward and backward over all microbatches.
        gradients: makes gradients final.
        clipper: norm, clipping and the finiteness flag.
        statistics: metrics over each logging period.
        optimizer: updates the parameters.
        lr_schedule: step -> factor on the base learning rate.
        events: observers.
    """

    def __init__(
        self,
        seed: int,
        loss_scale: LossScale,
        executor: Executor,
        gradients: Gradients,
        clipper: Clipper,
        statistics: Statistics,
        optimizer: Optimizer,
        lr_schedule: LrSchedule,
        events: ev.Events,
    ) -> None:
        self.seed = seed
        self.loss_scale = loss_scale
        self.executor = executor
        self.gradients = gradients
        self.clipper = clipper
        self.statistics = statistics
        self.optimizer = optimizer
        self.lr_schedule = lr_schedule
        self.events = events

    def __call__(self, step: int, pack: Pack) -> ev.StepResult:
        """Run step ``step`` (0-based) on a pack that is on the device."""
        torch.manual_seed(derive_seed(self.seed, "step", step))
        self.events.emit(ev.StepStarts(step, pack))

        self.events.emit(ev.ForwardBackwardStarts(step))
        self.statistics.begin()
        scale = self.loss_scale.begin(pack)  # known before the first backward, so gradients need no scaling pass
        loss = self.executor.run(pack, scale)
        self.events.emit(ev.ForwardBackwardEnds(step))

        self.gradients.finish()
        grad_norm, finite = self.clipper.clip(loss.total)

        self.events.emit(ev.OptimizerStepStarts(step))
        self.optimizer.set_lr_factor(self.lr_schedule(step))  # a pure function of the step: nothing to save
        self.optimizer.step(gate=finite)  # a non-finite step changes nothing, decided on the device
        self.events.emit(ev.OptimizerStepEnds(step))

        self.statistics.settle(finite)
        self.gradients.reset()
        result = ev.StepResult(loss.total, loss.terms, grad_norm, finite)
        self.events.emit(ev.StepEnds(step, result))
        return result
