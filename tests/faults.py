"""Faults that a distributed trainer may have; each breaks one thing in this process, before a job is built.

They leave a job of one process alone, which is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.job import Job
from d9d_core.loop import build, gradients, loss
from d9d_core.loop.clipper import Clipper
from d9d_core.loop.gradients import Gradients
from d9d_core.loop.ownership import Ownership
from d9d_core.topology.local import local
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule


def forgotten_reduction(_job: Job) -> None:
    """The synchroniser owns nothing; two norms are left to it."""
    gradients._members = lambda *_: []


def double_reduction(_job: Job) -> None:
    finish = Gradients.finish

    def twice(self: Gradients) -> None:
        finish(self)
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad))

    Gradients.finish = twice  # type: ignore[method-assign]


def average_instead_of_sum(_job: Job) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = (  # type: ignore[method-assign]
        lambda self, _factor: divide(self, float(dist.get_world_size()))
    )


def forgotten_replicas(_job: Job) -> None:
    before = Gradients.before_backward

    def never(self: Gradients, last: bool) -> None:
        before(self, last)
        for reducer in self._reducers:
            reducer._root.set_requires_all_reduce(False)  # type: ignore[attr-defined]

    Gradients.before_backward = never  # type: ignore[method-assign]


def wrong_loss_weight(_job: Job) -> None:
    begin = loss.LossScale.begin

    def own(self: loss.LossScale, pack: Any) -> Any:
        group, self._group = self._group, None
        scale = begin(self, pack)
        self._group = group
        ranks = dist.get_world_size()
        return {term: factor / ranks for term, factor in scale.items()}

    loss.LossScale.begin = own  # type: ignore[method-assign]


def shuffled_shard(_job: Job) -> None:
    context = build.DataContext

    def other(**facts: Any) -> Any:
        return context(**facts | {"seed": facts["seed"] + (1 if facts["rank"] == 1 else 0)})

    build.DataContext = other  # type: ignore[misc,assignment]


def last_microbatch_only(_job: Job) -> None:
    before = Gradients.before_backward

    def forget(self: Gradients, last: bool) -> None:
        if last and dist.get_world_size() > 1:
            for parameter in self._parameters.values():
                parameter.grad = None
        before(self, last)

    Gradients.before_backward = forget  # type: ignore[method-assign]


def other_initial_weights(_job: Job) -> None:
    initialise = build.initialise

    def by_rank(stage: torch.nn.Module, seed: int, device: torch.device) -> None:
        initialise(stage, seed + dist.get_world_size() - 1, device)

    build.initialise = by_rank  # type: ignore[assignment]


def norm_of_own_shard(_job: Job) -> None:
    power = Clipper._power

    def own(self: Clipper, device: torch.device) -> torch.Tensor:
        return power(self, device) * (1.0 if dist.get_rank() == 0 else 0.0)

    Clipper._power = own  # type: ignore[method-assign]


def lost_owner(_job: Job) -> None:
    """The owner of one parameter's reduction is lost."""
    synchronised = Ownership.synchronised

    def lost(self: Ownership, parameter: str) -> tuple[str, ...]:
        return () if parameter == "norm.weight" else synchronised(self, parameter)

    Ownership.synchronised = lost  # type: ignore[method-assign]
