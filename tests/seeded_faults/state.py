"""Faults in initial values, replicas, buffers, evaluation, metrics, saves and resumes."""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.tensors import local
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.compose import weights as build
from d9d_engine.job import Job
from d9d_engine.step import auxiliary_losses, metrics
from torch import Tensor
from torch import distributed as dist

from seeded_faults.seeding import Patch, built, is_last, saved, wrapped


def other_initial_weights(_job: Job, patch: Patch) -> None:
    """Initial weights depend on the number of ranks."""
    initialise = build.initialise  # type: ignore[attr-defined]

    def by_rank(stage: torch.nn.Module, seed: int, device: torch.device) -> None:
        initialise(stage, seed + dist.get_world_size() - 1, device)

    patch.setattr(build, "initialise", by_rank)


def other_replica(_job: Job, patch: Patch) -> None:
    """The last rank starts from other values."""
    initialise = build.initialise  # type: ignore[attr-defined]
    patch.setattr(build, "initialise", lambda stage, seed, device: initialise(stage, seed + int(is_last()), device))


def drifting_replica(_job: Job, patch: Patch) -> None:
    """One bit of a weight changes on the last rank, after each step."""

    def change(trainer: Any) -> None:
        parameter = next(iter(trainer.stage.parameters()))

        def drift(_gate: Tensor) -> None:
            with torch.no_grad():
                local(parameter).view(-1)[0].mul_(1 + 2 * torch.finfo(parameter.dtype).eps)

        wrapped(trainer.step.optimizer, "step", drift)

    built(patch, change)


def own_loads(_job: Job, patch: Patch) -> None:
    """Each rank balances experts by its own loads."""
    patch.setattr(auxiliary_losses, "_reduce", lambda _tensors, _group: None)


def frozen_bias(_job: Job, patch: Patch) -> None:
    """The selection bias is never updated."""
    patch.setattr(auxiliary_losses.Tallies, "adapt", lambda self, _finite: self._sums.clear())


def heavier_balance(_job: Job, patch: Patch) -> None:
    """The losses that balance experts have twice their weight on one rank."""
    begin = auxiliary_losses.AuxiliaryLosses.begin

    def heavier(self: Any, scale: Any) -> None:
        begin(self, {term: factor * (2.0 if is_last() else 1.0) for term, factor in scale.items()})

    patch.setattr(auxiliary_losses.AuxiliaryLosses, "begin", heavier)


def evaluated_alone(_job: Job, patch: Patch) -> None:
    """Each rank evaluates its own samples only."""
    built(patch, lambda trainer: setattr(trainer.evaluator, "_group", None), everywhere=True)


def evaluated_on_other_data(_job: Job, patch: Patch) -> None:
    """One rank continues in the evaluation data instead of starting again."""

    def change(trainer: Any) -> None:
        trainer.evaluator.sets[0].prefetcher.next()

    built(patch, change)


def unmerged_metric(_job: Job, patch: Patch) -> None:
    """Metrics cover one rank only."""

    def own(self: Any, _packed: Any) -> dict[str, dict[str, Tensor]]:
        return {name: dict(metric.state()) for name, metric in self._metrics.items()}

    patch.setattr(metrics.Statistics, "_reduced", own)


def lost_observations(_job: Job, patch: Patch) -> None:
    """One rank observes every other step only."""

    def change(trainer: Any) -> None:
        statistics = trainer.step.statistics
        update = statistics.update
        calls: list[None] = []

        def sometimes(observations: Any) -> None:
            calls.append(None)
            if len(calls) % 2:
                update(observations)

        statistics.update = sometimes

    built(patch, change)


def shard_of_another(_job: Job, patch: Patch) -> None:
    """One rank saves its shards with their rows shifted by one."""
    saved(patch, lambda tensor: tensor.roll(1, 0) if tensor.dim() else tensor)


def unloaded_optimizer(_job: Job, patch: Patch) -> None:
    """One rank does not load the optimizer state when it resumes."""
    load_into = Checkpoint.load_into

    def partly(self: Any, tensors: Any, scope: str = "", *rest: Any, **more: Any) -> None:
        if scope == "optimizer/" and is_last():
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        load_into(self, tensors, scope, *rest, **more)

    patch.setattr(Checkpoint, "load_into", partly)


def unloaded_weights(_job: Job, patch: Patch) -> None:
    """One rank does not load the weights when it resumes."""
    load_into = Checkpoint.load_into

    def partly(self: Any, tensors: Any, scope: str = "", *rest: Any, **more: Any) -> None:
        if scope == "model/" and is_last():
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        load_into(self, tensors, scope, *rest, **more)

    patch.setattr(Checkpoint, "load_into", partly)


def unmoved_data(_job: Job, patch: Patch) -> None:
    """A resumed run starts again from the first samples."""

    def change(trainer: Any) -> None:
        start = trainer.prefetcher.state()
        load = trainer.prefetcher.load_state
        trainer.prefetcher.load_state = lambda _state: load(start)

    built(patch, change, everywhere=True)
