"""Meetings: the steps after which replicas average their parameters, or take a step of DiLoCo's outer optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.tensors import local
from torch import Tensor, nn
from torch import distributed as dist

from d9d_local_sgd.buckets import means, wide


class Averages:
    """Averaging of local SGD, as :class:`d9d_core.strategy.Meetings`: θ_i ← (θ_1 + ... + θ_R) / R for each replica i.

    Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, Algorithm 1. The mean is computed
    in float32 (or the parameter's dtype, if wider) and rounded to the parameter's dtype.

    Args:
        stage: pipeline stage of this rank.
        group: process group of the replicas; ``None`` for a single process.
        replicas: number of replicas R.
        period: number of steps between two averagings.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup | None, replicas: int, period: int) -> None:
        self._stage = stage
        self._group = group
        self._replicas = replicas
        self._period = period

    def start(self) -> None:
        """Do nothing, because local SGD has no state."""

    def due(self, steps: int) -> bool:
        """Whether the replicas average after step ``steps``: if it is a multiple of the period."""
        return steps % self._period == 0

    @torch.no_grad()
    def meet(self) -> None:
        """Replace the trained parameters by their means. Collective over the replicas."""
        own = local_parameters(self._stage)
        for name, mean in means(own, lambda name: own[name].to(wide(own[name])), self._group, self._replicas):
            own[name].copy_(mean)

    def state(self) -> Mapping[str, Tensor]:
        """Return no tensors, because local SGD has no state."""
        return {}


class OuterSteps:
    """Outer steps of DiLoCo with Nesterov momentum, as :class:`d9d_core.strategy.Meetings`.

    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
    Algorithm 1. With the parameters θ after the last outer step, and θ_i of replica i after its inner steps:

        Δ ← ((θ - θ_1) + ... + (θ - θ_R)) / R        outer gradient
        m ← outer_momentum m + Δ
        θ ← θ - outer_lr (Δ + outer_momentum m)      Nesterov momentum, as in ``torch.optim.SGD``
        θ_i ← θ

    Sums and the momentum are in float32 (or the parameter's dtype, if wider); θ has the parameter's dtype.

    Args:
        stage: pipeline stage of this rank.
        group: process group of the replicas; ``None`` for a single process.
        replicas: number of replicas R.
        period: number of inner steps between two outer steps.
        lr: learning rate of the outer steps.
        momentum: momentum of the outer steps.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: dist.ProcessGroup | None,
        replicas: int,
        period: int,
        lr: float,
        momentum: float,
    ) -> None:
        self._stage = stage
        self._group = group
        self._replicas = replicas
        self._period = period
        self._lr = lr
        self._momentum = momentum
        self._anchors: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def start(self) -> None:
        """Copy the current parameters to θ, and set the momentum to zero."""
        trained = trained_parameters(self._stage)
        self._anchors = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._moments = {name: torch.zeros_like(p, dtype=wide(p)).detach() for name, p in trained.items()}

    def due(self, steps: int) -> bool:
        """Whether an outer step follows inner step ``steps``: if it is a multiple of the period."""
        return steps % self._period == 0

    @torch.no_grad()
    def meet(self) -> None:
        """Make an outer step, and copy its result to the parameters. Collective over the replicas."""
        own = local_parameters(self._stage)
        anchors, moments = ({name: local(t) for name, t in held.items()} for held in (self._anchors, self._moments))

        def change(name: str) -> Tensor:
            return anchors[name].to(wide(own[name])) - own[name]

        for name, gradient in means(own, change, self._group, self._replicas):
            moment = moments[name].mul_(self._momentum).add_(gradient)
            update = gradient.add_(moment, alpha=self._momentum)
            own[name].copy_(anchors[name] - self._lr * update)
            anchors[name].copy_(own[name])

    def state(self) -> Mapping[str, Tensor]:
        """``<parameter>/anchor`` (θ) and ``<parameter>/outer_momentum`` (m), in the parameters' shapes and layouts."""
        anchors = {f"{name}/anchor": tensor for name, tensor in self._anchors.items()}
        return anchors | {f"{name}/outer_momentum": tensor for name, tensor in self._moments.items()}


def trained_parameters(stage: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters of a stage by name. Callers do not store them, because strategies replace parameters."""
    return {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}


def local_parameters(stage: nn.Module) -> dict[str, Tensor]:
    """Local shards of a stage's trained parameters by name; writing to them changes the parameters."""
    return {name: local(parameter).detach() for name, parameter in trained_parameters(stage).items()}
