"""Faults in samples, labels, masks and positions."""

from __future__ import annotations

from typing import Any

import torch
from d9d_engine.compose.parts import data as build
from d9d_engine.job import Job
from torch import Tensor

from seeded_faults.seeding import Patch, built, packs

IGNORED = -100


def shuffled_shard(_job: Job, patch: Patch) -> None:
    """One rank reads other samples, because it has another seed."""
    context = build.DataContext  # type: ignore[attr-defined]

    def other(**facts: Any) -> Any:
        return context(**facts | {"seed": facts["seed"] + (1 if facts["rank"] == 1 else 0)})

    patch.setattr(build, "DataContext", other)


def same_samples(_job: Job, patch: Patch) -> None:
    """The last rank reads the samples of the first rank."""
    context = build.DataContext  # type: ignore[attr-defined]
    patch.setattr(build, "DataContext", lambda **facts: context(**facts | {"rank": 0}))


def repeated_pack(_job: Job, patch: Patch) -> None:
    """One rank trains on its first pack in every step."""

    def change(trainer: Any) -> None:
        first: list[Any] = []
        take = trainer.prefetcher.next

        def again() -> Any:
            pack = take()
            first.append(pack)
            return first[0]

        trainer.prefetcher.next = again

    built(patch, change)


def other_token(_job: Job, patch: Patch) -> None:
    """One token of each microbatch is replaced."""
    packs(patch, lambda microbatch: microbatch["tokens"][:, 1].fill_(7))


def late_targets(_job: Job, patch: Patch) -> None:
    """On one rank, targets are the input tokens instead of the next tokens."""

    def change(microbatch: dict[str, Tensor]) -> None:
        counted = microbatch["targets"] != IGNORED
        microbatch["targets"] = torch.where(counted, microbatch["tokens"], IGNORED)

    packs(patch, change)


def one_wrong_target(_job: Job, patch: Patch) -> None:
    """One target of each microbatch is replaced."""
    packs(patch, lambda microbatch: microbatch["targets"][0, 2].fill_(5))


def unmasked_targets(_job: Job, patch: Patch) -> None:
    """One rank computes the loss of ignored targets too."""
    packs(patch, lambda m: m.update(targets=m["targets"].masked_fill(m["targets"] == IGNORED, 0)))


def masked_targets(_job: Job, patch: Patch) -> None:
    """One rank ignores the last target of each sample."""
    packs(patch, lambda microbatch: microbatch["targets"][:, -1].fill_(IGNORED))


def across_documents(_job: Job, patch: Patch) -> None:
    """On one rank, tokens attend to earlier documents of the same sample."""
    packs(patch, lambda microbatch: microbatch["documents"].zero_())


def stretched_positions(_job: Job, patch: Patch) -> None:
    """Position ids are doubled on one rank."""
    packs(patch, lambda microbatch: microbatch["positions"].mul_(2))
