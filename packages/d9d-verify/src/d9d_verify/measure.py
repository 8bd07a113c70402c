"""Measurement of what a layout computes: the first steps of a job, whatever changes in them, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from d9d_core import events as ev
from d9d_core.job_file.job import JobConfig
from d9d_core.metric import Table
from d9d_core.optimizer import LrSchedule, Optimizer
from d9d_core.schedule import MicrobatchAction, Program, Schedule
from d9d_core.subscriber import Subscriber
from d9d_core.tensors import local
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_engine.run.checkpointer import Progress, open_store
from d9d_engine.run.trainer import Trainer
from d9d_weights.sharding.model_tensors import model_tensors
from torch import Tensor, nn

from d9d_verify.measurement import Measurement, Record, fill

#: Share of its length by which the median parameter changes in a measured step.
VISIBLE = 0.05


@dataclass(frozen=True, slots=True)
class Rate:
    """Learning rate of measured steps: high enough to show what an optimizer does, beyond a warm-up.

    Attributes:
        factor: on the schedule's factors.
        first: step of the schedule that the first measured step takes its factor from.
    """

    factor: float = 1.0
    first: int = 0

    def on(self, schedule: LrSchedule) -> LrSchedule:
        """Schedule of the measured steps."""
        return lambda step: self.factor * schedule(self.first + step)


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume in the middle of a measurement: the state is saved, and another run's is loaded in its place.

    Attributes:
        step: after so many steps.
        load: directory of the other run's checkpoint of that step; ``None`` goes on without a load.
    """

    step: int
    load: Path | None = None


class Witness:
    """Measuring subscriber: records what each step computes on this rank.

    With a ``guide``, the optimizer gets the reference's gradients, once this rank's own are recorded, and persistent
    buffers go on from the reference's. So every step starts where the reference's does: the rounding errors of one step
    are not in the next, and an optimizer is judged by equal gradients.

    Args:
        guide: the reference.
    """

    def __init__(self, guide: Measurement | None = None) -> None:
        self._guide = guide
        self._stage: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self.record = Record()

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the parts of a run that are ready, and in each step to gradients, updates and the result."""
        return [
            (ev.JobConfigured, self._configured),
            (ev.ModelReady, self._model_ready),
            (ev.OptimizerReady, self._optimizer_ready),
            (ev.OptimizerStepStarts, self._gradients_final),
            (ev.OptimizerStepEnds, self._updated),
            (ev.StepEnds, self._step_ends),
        ]

    def _configured(self, event: ev.JobConfigured) -> None:
        assert isinstance(event.job, JobConfig)  # it trains
        if event.job.gradient_clipping.max_norm is not None:
            self.record.numbers["start/max_norm"] = event.job.gradient_clipping.max_norm

    def _model_ready(self, event: ev.ModelReady) -> None:
        self._stage = event.stage
        self.record.take("start/model", model_tensors(event.stage))

    def _optimizer_ready(self, event: ev.OptimizerReady) -> None:
        self._optimizer = event.optimizer

    def _gradients_final(self, event: ev.OptimizerStepStarts) -> None:
        assert self._stage is not None
        gradients = {name: p.grad for name, p in self._stage.named_parameters() if p.grad is not None}
        self.record.take(f"{event.step}/gradients", gradients)
        if self._guide is not None:
            fill(gradients, self._guide.under(f"{event.step}/gradients"))

    def _updated(self, event: ev.OptimizerStepEnds) -> None:
        assert self._stage is not None
        assert self._optimizer is not None
        self.record.take(f"{event.step}/model", model_tensors(self._stage))
        self.record.take(f"{event.step}/optimizer", _here(self._optimizer.state()))
        self.record.numbers[f"{event.step}/lr"] = self._optimizer.lr
        if self._guide is not None:
            fill(dict(self._stage.named_buffers()), self._guide.under(f"{event.step}/model"))

    def _step_ends(self, event: ev.StepEnds) -> None:
        self.record.numbers[f"{event.step}/loss"] = event.result.loss.item()
        self.record.numbers[f"{event.step}/grad_norm"] = event.result.grad_norm.item()


class Jitter:
    """Jitter for a measurement: moves what each layer returns by up to half of its last bit, up or down at random.

    Kernels, layouts and orders of sums that are all right differ by that much. What follows from it, such as a token
    that goes to another expert, is no fault.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)  # of its own: dropout must draw what it always does

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscription to the ready model."""
        return [(ev.ModelReady, self._model_ready)]

    def _model_ready(self, event: ev.ModelReady) -> None:
        for module in event.stage.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._moved)

    def _moved(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        share = torch.rand(output.shape, generator=self._generator).to(output.device) - 0.5
        return (output * (1 + share * torch.finfo(output.dtype).eps)).to(output.dtype)


def measure(
    job: Job,
    topology: Topology,
    steps: int,
    guide: Measurement | None = None,
    rate: Rate | None = None,
    resume: Resume | None = None,
    elsewhere: bool = False,
) -> Record:
    """Measure the first steps of a job, then its metrics and its evaluation, without logs or export.

    Collective over all ranks.

    Args:
        job: a small one: all tensors of all steps are kept.
        topology: this process among others.
        steps: how many.
        guide: the reference that every step starts from, see :class:`Witness`.
        rate: learning rate of the steps; by default the job's own.
        resume: a save, and maybe a load, between two steps.
        elsewhere: round elsewhere, as a sound run might, see :class:`Jitter`; and if there is one pipeline stage, run
            the microbatches of a step in reverse order.

    Raises:
        D9dError: the job cannot run.
    """
    witness = Witness(guide)
    observers: list[Subscriber] = [witness, Jitter()] if elsewhere else [witness]
    trainer: Trainer = job.build(lambda _text: None, topology, observers=observers)
    if rate is not None:
        trainer.step.lr_schedule = rate.on(trainer.step.lr_schedule)
    executor = trainer.step.executor
    if elsewhere and len(executor.pipeline.hosts) == 1:
        executor.pipeline = replace(executor.pipeline, schedule=_backwards(executor.pipeline.schedule), _programs={})
    with trainer.checkpointer.store.opened() if resume else nullcontext(), trainer.prefetcher as prefetcher:
        for step in range(steps):
            if resume is not None and step == resume.step:
                _resume(trainer, resume)
            trainer.step(step, prefetcher.next())
    for series, value in trainer.step.statistics.compute().items():
        witness.record.numbers |= _numbers(f"end/{series}", value)
    if trainer.evaluator is not None:
        witness.record.numbers |= {f"end/{series}": value for series, value in trainer.evaluator.run().items()}
    return witness.record


def probe(job: Job, topology: Topology, steps: int) -> tuple[Rate, float]:
    """Find the learning rate for a measurement, and the gradient norm of the first step. Collective over all ranks.

    Updates then change the median parameter by :data:`VISIBLE` of its length, and the schedule is beyond its warm-up.
    """
    witness = Witness()
    trainer: Trainer = job.build(lambda _text: None, topology, observers=[witness])
    schedule, last = trainer.step.lr_schedule, max(trainer.total_steps - steps, 0)
    factors = {step: schedule(step) for step in range(0, last + 1, 1 + last // 1000)}
    first = next(step for step, factor in factors.items() if factor >= max(factors.values()) / 2)
    trainer.step.lr_schedule = lambda _step: 1.0
    with trainer.prefetcher as prefetcher:
        trainer.step(0, prefetcher.next())
    found = Measurement.of([witness.record])
    before, after = found.under("start/model"), found.under("0/model")
    lengths = [(before[name].double(), after[name].double()) for name in found.under("0/gradients")]
    ratios = sorted(((b - a).norm() / a.norm()).item() for a, b in lengths if a.norm() > 0 and not a.equal(b))
    middle = ratios[len(ratios) // 2] if ratios else 0.0
    usable = math.isfinite(middle) and middle * factors[first] > 0
    return Rate(VISIBLE / (middle * factors[first]) if usable else 1.0, first), found.numbers["0/grad_norm"]


def _resume(trainer: Trainer, resume: Resume) -> None:
    """Save, and load what another run saved. Collective over all ranks."""
    trainer.checkpointer.save(Progress(resume.step), wait=True)
    if resume.load is None:
        return
    elsewhere = trainer.job.checkpoint.model_copy(update={"dir": str(resume.load)})
    _forget(trainer)
    own = trainer.checkpointer.store
    trainer.checkpointer.store = open_store(trainer.job.model_copy(update={"checkpoint": elsewhere}), trainer.topology)
    trainer.checkpointer.restore()
    trainer.checkpointer.store = own


def _forget(trainer: Trainer) -> None:
    """Make useless what is in memory, as it is in a new process: what is not loaded then shows."""
    with torch.no_grad():
        for tensor in trainer.checkpointer.tensors().values():
            local(tensor).zero_()
    trainer.step.statistics.reset()
    trainer.prefetcher.next()


def _here(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state of the parameters on this rank; that of others is on the meta device."""
    return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}


def _backwards(schedule: Schedule) -> Schedule:
    """Schedule with the microbatches in reverse order: as good as the other, up to rounding."""

    def reversed_order(ranks: int, microbatches: int) -> list[Program]:
        last = microbatches - 1
        return [
            tuple(
                replace(action, microbatch=last - action.microbatch) if isinstance(action, MicrobatchAction) else action
                for action in program
            )
            for program in schedule(ranks, microbatches)
        ]

    return reversed_order


def _numbers(name: str, value: Tensor | Table) -> dict[str, float]:
    if isinstance(value, Table):
        cells = value.values.flatten().tolist()
        return {f"{name}[{index}]": float(cell) for index, cell in enumerate(cells)}
    return {name: float(value.item())}
