"""Measurement of a layout: all values of a job's first steps, on every rank."""

from __future__ import annotations

import math
import zlib
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
from d9d_engine.step.clip import Clipper
from d9d_engine.step.executor import StageLoss
from d9d_weights.sharding.model_tensors import model_tensors
from d9d_weights.sharding.shards import ReplicaSlice
from torch import Tensor, nn
from torch import distributed as dist

from d9d_verify.measurement import Measurement, Record, fill

#: Relative change of the median parameter in a measured step, to which the learning rate is scaled.
VISIBLE = 0.05
#: Factor of the learning rate in one more step, for bfloat16 weights: a weight of 1, as in norms, cannot change by less
#: than 2^-8, so smaller updates do not show.
LOUD = 40.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Learning rate of the measured steps: high enough for visible updates, and past the warm-up.

    Attributes:
        factor: multiplier of the learning rates of the job's schedule.
        first: step of the schedule that is used for the first measured step.
        loud: whether one more step follows, with :data:`LOUD` times the learning rate, to make updates more visible.
    """

    factor: float = 1.0
    first: int = 0
    loud: bool = False

    def on(self, schedule: LrSchedule, steps: int) -> LrSchedule:
        """Learning-rate schedule for the measured steps, from the job's schedule."""
        return lambda step: self.factor * (LOUD if step >= steps else 1.0) * schedule(self.first + step)


@dataclass(frozen=True, slots=True)
class Resume:
    """Save and resume in the middle of a measurement, with the checkpoint of another run.

    Attributes:
        step: number of steps before the save.
        load: directory of the checkpoints of another run to load; ``None`` continues without a load.
    """

    step: int
    load: Path | None = None


class Witness:
    """Subscriber that records the values of each step on this rank.

    With a ``guide``, this rank's gradients are replaced by the gradients of the reference after they are recorded, and
    buffers are replaced after each step. So every step starts from the same values as in the reference: rounding errors
    do not accumulate over steps, and optimizers are compared with equal gradients.

    Args:
        guide: measurement of the reference.
    """

    def __init__(self, guide: Measurement | None = None) -> None:
        self._guide = guide
        self._stage: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self.record = Record()

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the built model and optimizer, and to gradients, updates and results of each step."""
        return [
            (ev.JobConfigured, self._configured),
            (ev.ModelReady, self._model_ready),
            (ev.OptimizerReady, self._optimizer_ready),
            (ev.OptimizerStepStarts, self._gradients_final),
            (ev.OptimizerStepEnds, self._updated),
            (ev.StepEnds, self._step_ends),
        ]

    def _configured(self, event: ev.JobConfigured) -> None:
        assert isinstance(event.job, JobConfig)  # only training jobs are measured
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
        result = event.result
        terms = {f"loss/{name}": term for name, term in result.terms.items()} if len(result.terms) > 1 else {}
        scalars = {"loss": result.loss, **terms, "grad_norm": result.grad_norm, "tokens": result.tokens}
        self.record.numbers |= {f"{event.step}/{name}": value.item() for name, value in scalars.items()}


class Jitter:
    """Subscriber that randomly perturbs the outputs of modules without submodules, and gradients, in their last bit.

    Each element is multiplied by a random factor between 1 - eps / 2 and 1 + eps / 2, and rounded. Correct kernels,
    layouts and summation orders differ by as much. So differences that these perturbations cause, such
    as a token that goes to another expert, or another rounding in the matrix products of Muon, are not errors.

    Args:
        seed: seed of the perturbations.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)  # a separate generator, so that dropout is unchanged
        self._stage: nn.Module | None = None

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the built model, and to the gradients of each step."""
        return [(ev.ModelReady, self._model_ready), (ev.OptimizerStepStarts, self._gradients_final)]

    def _model_ready(self, event: ev.ModelReady) -> None:
        self._stage = event.stage
        for module in event.stage.modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(self._moved)

    def _moved(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        return _perturbed(output, self._generator)

    def _gradients_final(self, _event: ev.OptimizerStepStarts) -> None:
        assert self._stage is not None
        for name, parameter in self._stage.named_parameters():
            if parameter.grad is not None:
                own = local(parameter.grad)
                # A generator for each parameter, so that ranks with the same gradient perturb it in the same way.
                own.copy_(_perturbed(own, torch.Generator().manual_seed(self._seed + zlib.crc32(name.encode()))))


def _perturbed(values: Tensor, generator: torch.Generator) -> Tensor:
    # In float32, 1 + share * eps would be rounded down to 1 or below.
    share = torch.rand(values.shape, generator=generator, dtype=torch.float64).to(values.device) - 0.5
    return (values.double() * (1 + share * torch.finfo(values.dtype).eps)).to(values.dtype)


def measure(
    job: Job,
    topology: Topology,
    steps: int,
    guide: Measurement | None = None,
    rate: Rate | None = None,
    resume: Resume | None = None,
    elsewhere: bool = False,
    seed: int = 0,
) -> Record:
    """Measure the first steps of a job, then its metrics and its evaluation, without logs or export.

    Collective over all ranks.

    Args:
        job: small job, as all tensors of all steps are kept.
        topology: rank, device, meshes and process groups of this process.
        steps: number of steps.
        guide: measurement of the reference that each step starts from; see :class:`Witness`.
        rate: learning rate of the steps; by default the job's.
        resume: a save, and optionally a load, between two steps.
        elsewhere: whether to vary the rounding within the differences between correct runs (see :class:`Jitter`), and,
            with a single pipeline stage, to reverse the order of microbatches.
        seed: seed of the varied rounding.

    Raises:
        D9dError: the job cannot run.
    """
    witness = Witness(guide)
    observers: list[Subscriber] = [witness, Jitter(seed)] if elsewhere else [witness]
    trainer: Trainer = job.build(lambda _text: None, topology, observers=observers)
    join_replicas(trainer)
    if rate is not None:
        trainer.step.lr_schedule = rate.on(trainer.step.lr_schedule, steps)
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
            with trainer.step.evaluation_weights():
                witness.record.numbers |= {f"end/{series}": value for series, value in trainer.evaluator.run().items()}
        if rate is not None and rate.loud:
            trainer.step(steps, prefetcher.next())
    return witness.record


class MeanGradients(Clipper):
    """Clipper that first gives all replicas the mean of their gradients, weighted like the loss.

    Args:
        trainer: trainer whose replicas take their own steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._step, self._stage = trainer.step, trainer.stage
        self._clipper = trainer.step.clipper

    @torch.no_grad()
    def clip(self, loss: StageLoss, tokens: int | Tensor) -> ev.StepResult:
        """Replace gradients by their means, then clip. Collective over all ranks."""
        share, group = self._step.loss_scale.share, self._step.replicas.group
        assert share is not None
        for parameter in self._stage.parameters():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradient.mul_(share)
                dist.all_reduce(gradient, group=group)
        return self._clipper.clip(loss, tokens)


def join_replicas(trainer: Trainer) -> None:
    """Make local-step replicas (as in DiLoCo) comparable with one process: mean gradients, no periodic averaging.

    Each replica then makes the same steps. No effect without such replicas.
    """
    replicas = trainer.step.replicas
    if replicas.count > 1:
        trainer.step.clipper = MeanGradients(trainer)
        replicas.meetings = ()


def probe(job: Job, topology: Topology, steps: int) -> tuple[Rate, float]:
    """Find a learning rate for the measurement, and the gradient norm of the first step. Collective over all ranks.

    With this rate, an update changes the median parameter by :data:`VISIBLE` of its norm, and the schedule is past its
    warm-up.
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
    values = [(a.double(), b.double()) for a, b in _parameters(found)]
    ratios = sorted(((b - a).norm() / a.norm()).item() for a, b in values if a.norm() > 0 and not a.equal(b))
    middle = ratios[len(ratios) // 2] if ratios else 0.0
    usable = math.isfinite(middle) and middle * factors[first] > 0
    loud = usable and any(after.dtype == torch.bfloat16 for _, after in _parameters(found))
    factor = VISIBLE / (middle * factors[first]) if usable else 1.0
    return Rate(factor, first, loud), found.numbers["0/grad_norm"]


def _parameters(found: Measurement) -> list[tuple[Tensor, Tensor]]:
    """Trained parameters of a measurement before and after the first step."""
    before, after = found.under("start/model"), found.under("0/model")
    return [(before[name], after[name]) for name in found.under("0/gradients")]


def _resume(trainer: Trainer, resume: Resume) -> None:
    """Save a checkpoint, then load the checkpoint of another run if one is given. Collective over all ranks."""
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
    """Overwrite the state in memory, so that values that a load does not restore are detected.

    Parameters and optimizer state become zeros, metrics are reset, and the data advances by one pack.
    """
    with torch.no_grad():
        for tensor in trainer.checkpointer.tensors().values():
            local(tensor.tensor if isinstance(tensor, ReplicaSlice) else tensor).zero_()
    trainer.step.statistics.reset()
    trainer.prefetcher.next()


def _here(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state of this rank, without the states of other ranks' parameters, which are on the meta device."""
    return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}


def _backwards(schedule: Schedule) -> Schedule:
    """Schedule with the microbatches in reverse order, which is equivalent up to rounding."""

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
