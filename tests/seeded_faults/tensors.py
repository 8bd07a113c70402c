"""Faults of tensor parallelism: in what ranks that share matrices, words and positions exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from d9d_core.strategy import GradientOwner
from d9d_engine.job import Job
from d9d_engine.step import clip
from d9d_nn.ops import vocabulary_parallel
from d9d_parallel.tensor_parallel import forwards, strategy
from d9d_parallel.tensor_parallel.collectives import OwnPositions
from torch import Tensor
from torch import distributed as dist

from seeded_faults.seeding import Patch


def norms_apart(_job: Job, patch: Patch) -> None:
    """The gradients of norms are not summed over tp."""
    _leave(patch, "norm.weight")


def repeated_heads_apart(_job: Job, patch: Patch) -> None:
    """Key/value heads are on several ranks, and their gradients are not summed."""
    _leave(patch, "k_proj.weight", "v_proj.weight")


def _leave(patch: Patch, *ends: str) -> None:
    owners = strategy._Split.gradients

    def fewer(self: Any, stage: Any) -> Iterator[GradientOwner]:
        for owner in owners(self, stage):
            left = owner.parameter.endswith(ends)
            yield GradientOwner(owner.parameter, owner.axis, "none") if left else owner

    patch.setattr(strategy._Split, "gradients", fewer)


def own_gradient_of_hidden_states(_job: Job, patch: Patch) -> None:
    """Each rank keeps its slice of the gradients of gathered positions, without a sum over ranks."""
    gather = forwards.gather
    patch.setattr(forwards, "gather", lambda *given, **more: gather(*given, **more | {"summed": False}))


def own_logit_of_the_target(_job: Job, patch: Patch) -> None:
    """The logits of the targets are not summed over ranks."""
    reduce = vocabulary_parallel.dist.all_reduce

    def but_one(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        kept = tensor[1:2].clone()
        reduce(tensor, op, group=group)
        if tensor.ndim > 1:
            tensor[1:2] = kept

    patch.setattr(vocabulary_parallel, "dist", _Replaced(vocabulary_parallel.dist, all_reduce=but_one))


def unmerged_words(_job: Job, patch: Patch) -> None:
    """Each rank uses the largest logit of its own vocabulary shard instead of the largest of all shards."""
    reduce = vocabulary_parallel.dist.all_reduce

    def some(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            reduce(tensor, op, group=group)

    patch.setattr(vocabulary_parallel, "dist", _Replaced(vocabulary_parallel.dist, all_reduce=some))


class _Replaced:
    """A module some of whose functions are others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def positions_of_another(_job: Job, patch: Patch) -> None:
    """Each rank sends its tokens to the experts chosen for the first rank's tokens."""
    patch.setattr(OwnPositions, "own", lambda self, tensor: tensor.chunk(self._ranks.size, dim=1)[0])


def norm_of_the_first_share(_job: Job, patch: Patch) -> None:
    """The gradient norm counts only gradients of the first rank of tp."""
    patch.setattr(clip, "counts", lambda _parameter, topology, *_, **__: topology.coordinate["tp"] == 0)
