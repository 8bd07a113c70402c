"""Faults of context parallelism: in what ranks that share the positions of samples exchange, and in who has which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from d9d_engine.job import Job
from d9d_nn import text_task
from d9d_nn.ops.attention.sdpa import Sdpa
from d9d_parallel.context_parallel import ring, share
from torch import Tensor
from torch import distributed as dist

from seeded_faults.seeding import Patch


def skipped_turn(_job: Job, patch: Patch) -> None:
    """Each rank of a ring skips the keys of the previous rank."""
    parts = ring.Plan.parts

    def fewer(self: ring.Plan, source: int) -> Sequence[Any]:
        return [] if source == (self.ranks.rank - 1) % self.ranks.size else parts(self, source)

    patch.setattr(ring.Plan, "parts", fewer)


def leaking_document(_job: Job, patch: Patch) -> None:
    """With all_gather, queries attend to the document before their own."""
    prepare = Sdpa.prepare_queries

    def leaking(self: Sdpa, documents: Tensor | None, *given: Any) -> Tensor:
        return prepare(self, None if documents is None else documents // 2, *given)

    patch.setattr(Sdpa, "prepare_queries", leaking)


def leaking_document_in_a_ring(_job: Job, patch: Patch) -> None:
    """In a ring, queries attend to keys of other documents on other ranks."""
    parts = ring.Plan.parts

    def open_to_all(self: ring.Plan, source: int) -> Sequence[Any]:
        return parts(self if source == self.ranks.rank else replace(self, documents=None), source)

    patch.setattr(ring.Plan, "parts", open_to_all)


def unsplit_positions(_job: Job, patch: Patch) -> None:
    """Each rank uses the position ids of a sample's first positions instead of its own."""
    own = text_task.own_positions

    def first(microbatch: Any, of: Any) -> Any:
        part = own(microbatch, of)
        length = part["tokens"].shape[1]
        return {**part, "positions": microbatch["positions"][:, :length]} if of.ranks > 1 else part

    patch.setattr(text_task, "own_positions", first)


def own_gradient_of_gathered_keys(_job: Job, patch: Patch) -> None:
    """Each rank keeps its slice of the gradients of gathered keys and values, without a sum over ranks."""
    patch.setattr(share, "dist", _Cut(share.dist))


class _Cut:
    """torch.distributed, but a reduce-scatter gives each rank its own part."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def reduce_scatter_tensor(self, out: Tensor, parts: Tensor, group: Any) -> None:
        out.copy_(parts.chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(out))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
