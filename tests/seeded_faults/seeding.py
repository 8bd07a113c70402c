"""Seeding of faults in a trainer that is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from d9d_engine.checkpoint import store
from d9d_engine.job import Job
from d9d_weights.sharding.shards import LocalShards, TensorShard
from torch import Tensor
from torch import distributed as dist

Patch = pytest.MonkeyPatch


def is_last() -> bool:
    """Whether this is the rank that is broken, if only one is."""
    return dist.get_rank() == dist.get_world_size() - 1


def built(patch: Patch, change: Callable[[Any], None], everywhere: bool = False) -> None:
    """Change the trainer on the last rank, or on all."""
    make = Job.build

    def broken(self: Job, *given: Any, **named: Any) -> Any:
        trainer = make(self, *given, **named)
        if everywhere or is_last():
            change(trainer)
        return trainer

    patch.setattr(Job, "build", broken)


def wrapped(owner: Any, name: str, after: Callable[..., None]) -> None:
    """Call something after a method of an object."""
    method = getattr(owner, name)

    def both(*given: Any, **named: Any) -> Any:
        result = method(*given, **named)
        after(*given, **named)
        return result

    setattr(owner, name, both)


def saved(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Change every shard that the last rank saves."""
    describe = store.describe  # type: ignore[attr-defined]

    def wrong(tensors: Any) -> Any:
        found = describe(tensors)
        if not is_last():
            return found
        return {
            name: LocalShards(
                held.dtype, held.shape, tuple(TensorShard(s.offset, change(s.tensor)) for s in held.shards)
            )
            for name, held in found.items()
        }

    patch.setattr(store, "describe", wrong)


def packs(patch: Patch, change: Callable[[dict[str, Tensor]], None], everywhere: bool = False) -> None:
    """Change every microbatch that is trained on."""

    def altered(trainer: Any) -> None:
        take = trainer.prefetcher.next

        def taken() -> Any:
            pack = [{name: tensor.clone() for name, tensor in microbatch.items()} for microbatch in take()]
            for microbatch in pack:
                change(microbatch)
            return pack

        trainer.prefetcher.next = taken

    built(patch, altered, everywhere)
