"""Faults that a distributed trainer may have; each breaks one thing in this process, before a job is built.

They leave a job of one process alone, which is the reference. Each takes the job, and what undoes the fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from d9d_core.extend import local
from d9d_engine.api import Job
from d9d_engine.build import compose as build
from d9d_engine.step import gradients, loss
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import Ownership
from d9d_engine.step.tied import Ties
from d9d_engine.step.totals import Clipper
from d9d_pipeline.runtime.handlers import SplitBackwardHandlers
from d9d_pipeline.runtime.transfers import Transfers
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

Patch = pytest.MonkeyPatch
FOR_GOOD = Patch()


def forgotten_reduction(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """The synchroniser owns nothing; two norms are left to it."""
    patch.setattr(gradients, "_members", lambda *_: [])


def double_reduction(_job: Job, patch: Patch = FOR_GOOD) -> None:
    finish = Gradients.finish

    def twice(self: Gradients) -> None:
        finish(self)
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad))

    patch.setattr(Gradients, "finish", twice)


def average_instead_of_sum(_job: Job, patch: Patch = FOR_GOOD) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(
        FSDPModule, "set_gradient_divide_factor", lambda self, _factor: divide(self, float(dist.get_world_size()))
    )


def forgotten_replicas(_job: Job, patch: Patch = FOR_GOOD) -> None:
    before = Gradients.before_backward

    def never(self: Gradients, last: bool, **about: Any) -> None:
        before(self, last, **about)
        for reducer in self._reducers[0]:
            reducer._root.set_requires_all_reduce(False)  # type: ignore[attr-defined]

    patch.setattr(Gradients, "before_backward", never)


def wrong_loss_weight(_job: Job, patch: Patch = FOR_GOOD) -> None:
    begin = loss.LossScale.begin

    def own(self: loss.LossScale, pack: Any) -> Any:
        group, self._group = self._group, None
        scale = begin(self, pack)
        self._group = group
        ranks = dist.get_world_size()
        return {term: factor / ranks for term, factor in scale.items()}

    patch.setattr(loss.LossScale, "begin", own)


def shuffled_shard(_job: Job, patch: Patch = FOR_GOOD) -> None:
    context = build.DataContext  # type: ignore[attr-defined]

    def other(**facts: Any) -> Any:
        return context(**facts | {"seed": facts["seed"] + (1 if facts["rank"] == 1 else 0)})

    patch.setattr(build, "DataContext", other)


def last_microbatch_only(_job: Job, patch: Patch = FOR_GOOD) -> None:
    before = Gradients.before_backward

    def forget(self: Gradients, last: bool, **about: Any) -> None:
        if last and dist.get_world_size() > 1:
            for parameter in self._parameters.values():
                parameter.grad = None
        before(self, last, **about)

    patch.setattr(Gradients, "before_backward", forget)


def other_initial_weights(_job: Job, patch: Patch = FOR_GOOD) -> None:
    initialise = build.initialise  # type: ignore[attr-defined]

    def by_rank(stage: torch.nn.Module, seed: int, device: torch.device) -> None:
        initialise(stage, seed + dist.get_world_size() - 1, device)

    patch.setattr(build, "initialise", by_rank)


def norm_of_own_shard(_job: Job, patch: Patch = FOR_GOOD) -> None:
    power = Clipper._power

    def own(self: Clipper, device: torch.device) -> torch.Tensor:
        return power(self, device) * (1.0 if dist.get_rank() == 0 else 0.0)

    patch.setattr(Clipper, "_power", own)


def lost_owner(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """The owner of one parameter's reduction is lost."""
    synchronised = Ownership.synchronised

    def lost(self: Ownership, parameter: str) -> tuple[str, ...]:
        return () if parameter == "norm.weight" else synchronised(self, parameter)

    patch.setattr(Ownership, "synchronised", lost)


# --- of pipelines


def swapped_microbatches(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """The first two microbatches change places on their way to the next stage."""
    send = Transfers._send_activation

    def swapped(self: Transfers, action: Any, state: Any) -> None:
        if action.microbatch != 0:
            send(self, action, state)
        if action.microbatch == 1:
            send(self, replace(action, microbatch=0), state)

    patch.setattr(Transfers, "_send_activation", swapped)


def dropped_boundary_gradient(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """One microbatch sends nothing but zeros back."""
    send = Transfers._send_gradient

    def dropped(self: Transfers, action: Any, state: Any) -> None:
        if action.microbatch == 1:
            for gradient in state.input_gradients[action.stage, action.microbatch].values():
                gradient.zero_()
        send(self, action, state)

    patch.setattr(Transfers, "_send_gradient", dropped)


def forgotten_weights(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """One microbatch never computes the gradients of its weights."""
    weights = SplitBackwardHandlers.weights

    def forgotten(self: SplitBackwardHandlers, action: Any, state: Any) -> None:
        if action.microbatch == 1:
            del state.weights[action.stage, action.microbatch]
        else:
            weights(self, action, state)

    patch.setattr(SplitBackwardHandlers, "weights", forgotten)


def forgotten_tie_across_ranks(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """Each rank updates its copy of the embedding by its own share of the gradient."""
    patch.setattr(Ties, "reduce", lambda _self: None)


def forgotten_tie_on_a_rank(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """The copy on another stage of the same rank keeps its share of the gradient."""
    patch.setattr(Ties, "gather", lambda _self: None)


def stale_copy(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """The copy on another stage of the same rank keeps its first values."""
    copy_values = Ties.copy_values
    spreads: list[Ties] = []

    def once(self: Ties) -> None:
        if not spreads:
            copy_values(self)
        spreads.append(self)

    patch.setattr(Ties, "copy_values", once)


def tie_counted_twice(_job: Job, patch: Patch = FOR_GOOD) -> None:
    """Each rank with a copy of the embedding counts it in the gradient's norm."""
    find = build.find_ties  # type: ignore[attr-defined]
    patch.setattr(build, "find_ties", lambda *given: replace(find(*given), elsewhere=frozenset()))
