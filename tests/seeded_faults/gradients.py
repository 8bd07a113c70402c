"""Faults in gradients and their reduction over ranks."""

from __future__ import annotations

from typing import Any

from d9d_core.tensors import local
from d9d_engine.job import Job
from d9d_engine.step import gradients, loss
from d9d_engine.step.executor import Executor
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import Ownership
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from seeded_faults.seeding import Patch, built, is_last, wrapped


def forgotten_reduction(_job: Job, patch: Patch) -> None:
    """The synchroniser reduces no gradient; it should reduce two norms."""
    patch.setattr(gradients, "_members", lambda *_: [])


def double_reduction(_job: Job, patch: Patch) -> None:
    """Gradients are summed over ranks twice."""
    finish = Gradients.finish

    def twice(self: Gradients) -> None:
        finish(self)
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad))

    patch.setattr(Gradients, "finish", twice)


def average_instead_of_sum(_job: Job, patch: Patch) -> None:
    """FSDP2 divides by the number of ranks."""
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(
        FSDPModule, "set_gradient_divide_factor", lambda self, _factor: divide(self, float(dist.get_world_size()))
    )


def forgotten_replicas(_job: Job, patch: Patch) -> None:
    """Gradients are summed over shards, but not over replicas."""
    before = Gradients.before_backward

    def never(self: Gradients, last: bool, *rest: Any, **about: Any) -> None:
        before(self, last, *rest, **about)
        for reducer in self._reducers[0]:
            reducer._root.set_requires_all_reduce(False)  # type: ignore[attr-defined]

    patch.setattr(Gradients, "before_backward", never)


def wrong_loss_weight(_job: Job, patch: Patch) -> None:
    """Each rank divides the loss by the number of its own targets instead of all targets."""
    begin = loss.LossScale.begin

    def own(self: loss.LossScale, pack: Any) -> Any:
        group, self._group = self._group, None
        scale = begin(self, pack)
        self._group = group
        ranks = dist.get_world_size()
        return {term: factor / ranks for term, factor in scale.items()}

    patch.setattr(loss.LossScale, "begin", own)


def heavier_rank(_job: Job, patch: Patch) -> None:
    """The last rank's losses weigh 2 % more."""
    begin = loss.LossScale.begin

    def heavier(self: Any, pack: Any) -> Any:
        return {term: factor * (1.02 if is_last() else 1.0) for term, factor in begin(self, pack).items()}

    patch.setattr(loss.LossScale, "begin", heavier)


def mean_of_means(_job: Job, patch: Patch) -> None:
    """Every microbatch has the same weight, independent of its number of targets."""
    losses = Executor._loss

    def mean(self: Any, outputs: Any, microbatch: Any, state: Any) -> Any:
        own = self._task.weights(microbatch)
        scale = state.scale
        count = len(state.pack) * dist.get_world_size()
        state.scale = {**scale, **{term: 1 / (own[term] * count) for term in own}}
        value = losses(self, outputs, microbatch, state)
        state.scale = scale
        return value

    patch.setattr(Executor, "_loss", mean)


def last_microbatch_only(_job: Job, patch: Patch) -> None:
    """Earlier microbatches are dropped."""
    before = Gradients.before_backward

    def forget(self: Gradients, last: bool, *rest: Any, **about: Any) -> None:
        if last and dist.get_world_size() > 1:
            for parameter in self._parameters.values():
                parameter.grad = None
        before(self, last, *rest, **about)

    patch.setattr(Gradients, "before_backward", forget)


def lost_owner(_job: Job, patch: Patch) -> None:
    """The owner of one parameter's reduction is lost."""
    synchronised = Ownership.synchronised

    def lost(self: Ownership, parameter: str) -> tuple[str, ...]:
        return () if parameter == "norm.weight" else synchronised(self, parameter)

    patch.setattr(Ownership, "synchronised", lost)


def flipped_sign(_job: Job, patch: Patch) -> None:
    """One small parameter has a gradient with the opposite sign on one rank."""

    def change(trainer: Any) -> None:
        name, parameter = [(n, p) for n, p in trainer.stage.named_parameters() if "norm" in n][-1]
        del name
        wrapped(trainer.step.gradients, "finish", lambda: local(parameter.grad).neg_())

    built(patch, change)


def stale_gradients(_job: Job, patch: Patch) -> None:
    """Gradients are not cleared between two steps."""
    reset = gradients.Gradients.reset

    def kept(self: Any) -> None:
        before = {name: p.grad for name, p in self._parameters.items()}
        reset(self)
        for name, parameter in self._parameters.items():
            parameter.grad = before[name]

    patch.setattr(gradients.Gradients, "reset", kept)


def lost_gradient(_job: Job, patch: Patch) -> None:
    """One parameter has no gradient on one rank."""

    def change(trainer: Any) -> None:
        parameter = list(trainer.stage.parameters())[3]
        wrapped(trainer.step.gradients, "finish", lambda: local(parameter.grad).zero_())

    built(patch, change)
