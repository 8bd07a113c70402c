"""Faults in updates and clipping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from d9d_core.tensors import local
from d9d_engine.job import Job
from d9d_engine.step.clip import Clipper
from torch import Tensor
from torch import distributed as dist

from seeded_faults.seeding import Patch, built, wrapped


def frozen_rank(_job: Job, patch: Patch) -> None:
    """One rank does not update its parameters."""
    built(patch, lambda trainer: setattr(trainer.step.optimizer, "step", lambda _gate: None))


def forgotten_moments(_job: Job, patch: Patch) -> None:
    """One rank resets its moments after every step."""

    def change(trainer: Any) -> None:
        def forget(_gate: Tensor) -> None:
            for name, tensor in trainer.step.optimizer.state().items():
                if "exp_avg" in name and tensor.device.type != "meta":
                    local(tensor).zero_()

        wrapped(trainer.step.optimizer, "step", forget)

    built(patch, change)


def no_decay(_job: Job, patch: Patch) -> None:
    """One rank does not decay its weights."""

    def change(trainer: Any) -> None:
        optimizer = trainer.step.optimizer
        batch = optimizer._batch

        def without(*given: Any) -> Any:
            return replace(batch(*given), weight_decay=0.0)

        optimizer._batch = without

    built(patch, change)


def other_betas(_job: Job, patch: Patch) -> None:
    """One rank uses smaller betas."""

    def change(trainer: Any) -> None:
        optimizer = trainer.step.optimizer
        optimizer._config = optimizer._config.model_copy(update={"betas": (0.8, 0.95)})

    built(patch, change)


def doubled_rate(_job: Job, patch: Patch) -> None:
    """One rank uses twice the learning rate."""

    def change(trainer: Any) -> None:
        schedule = trainer.step.lr_schedule
        trainer.step.lr_schedule = lambda step: 2 * schedule(step)

    built(patch, change)


def late_schedule(_job: Job, patch: Patch) -> None:
    """The learning-rate schedule of one rank is one step late."""

    def change(trainer: Any) -> None:
        schedule = trainer.step.lr_schedule
        trainer.step.lr_schedule = lambda step: schedule(max(step - 1, 0))

    built(patch, change)


def skipped_parameter(_job: Job, patch: Patch) -> None:
    """One parameter is never updated on one rank."""

    def change(trainer: Any) -> None:
        parameter = list(trainer.stage.parameters())[-1]
        before = local(parameter).detach().clone()

        def undo(_gate: Tensor) -> None:
            with torch.no_grad():
                local(parameter).copy_(before)

        wrapped(trainer.step.optimizer, "step", undo)

    built(patch, change)


def stuck_counter(_job: Job, patch: Patch) -> None:
    """One rank always uses the bias correction of the first step."""

    def change(trainer: Any) -> None:
        def reset(_gate: Tensor) -> None:
            for name, tensor in trainer.step.optimizer.state().items():
                if name.endswith("/step") and tensor.device.type != "meta":
                    tensor.zero_()

        wrapped(trainer.step.optimizer, "step", reset)

    built(patch, change)


def update_twice(_job: Job, patch: Patch) -> None:
    """All ranks update twice in each step."""

    def change(trainer: Any) -> None:
        step = trainer.step.optimizer.step
        wrapped(trainer.step.optimizer, "step", step)

    built(patch, change, everywhere=True)


def norm_of_own_shard(_job: Job, patch: Patch) -> None:
    """The gradient norm covers one shard only."""
    power = Clipper._power

    def own(self: Clipper, device: torch.device) -> torch.Tensor:
        return power(self, device) * (1.0 if dist.get_rank() == 0 else 0.0)

    patch.setattr(Clipper, "_power", own)


def unclipped_rank(_job: Job, patch: Patch) -> None:
    """One rank does not clip."""
    built(patch, lambda trainer: setattr(trainer.step.clipper, "_max_norm", None))


def unclipped(_job: Job, patch: Patch) -> None:
    """No rank clips."""
    built(patch, lambda trainer: setattr(trainer.step.clipper, "_max_norm", None), everywhere=True)


def clipped_by_own_norm(_job: Job, patch: Patch) -> None:
    """Each rank clips by the norm of its own shards."""
    clip = Clipper.clip

    def own(self: Any, stage_loss: Any, tokens: int) -> Any:
        norm, limit = self._power(self._topology.device) ** (1 / self._norm.p), self._max_norm
        self._max_norm = None
        result = clip(self, stage_loss, tokens)
        self._max_norm = limit
        if limit is not None:
            self._divide(((norm.float() + 1e-6) / limit).clamp(min=1.0))
        return result

    patch.setattr(Clipper, "clip", own)


def other_limit(_job: Job, patch: Patch) -> None:
    """One rank clips to a larger norm."""

    def change(trainer: Any) -> None:
        trainer.step.clipper._max_norm = 1.1 * trainer.step.clipper._max_norm

    built(patch, change)
