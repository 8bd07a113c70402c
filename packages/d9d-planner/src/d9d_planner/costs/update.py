"""Costs of an optimizer's update of the parameters on one rank. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from d9d_core.cost import BlockCost, OptimizerCost, Weight


@dataclass(frozen=True, slots=True)
class Update:
    """Cost of an optimizer's update of some parameters on one rank, in bytes and operations of the rank.

    Attributes:
        state: bytes of the optimizer's state.
        traffic: bytes that are read and written.
        workspace: bytes that exist during the update.
        flops: operations of products.
        exchanged: bytes that go to ranks which update whole matrices; as many come back.
    """

    state: float = 0.0
    traffic: float = 0.0
    workspace: float = 0.0
    flops: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: Update) -> Update:
        """Update of both."""
        return Update(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Updates:
    """Costs of an optimizer's updates on one layout.

    Attributes:
        cost: of the optimizer.
        shards, expert_shards: numbers of ranks that share each parameter, and each one of experts.
        tensor: ranks of ``tp``.
    """

    cost: OptimizerCost
    shards: int
    expert_shards: int
    tensor: int

    def of(self, blocks: Iterable[BlockCost]) -> Update:
        """Update of all parameters of blocks that train."""
        if self.cost.of_weight is None:
            return self._alike(tuple(blocks))
        parts = [part for block in blocks for part in self._each(block)]
        largest = max((one for _, one in parts), default=0.0)
        return sum((update for update, _ in parts), Update(workspace=largest))

    def _alike(self, blocks: tuple[BlockCost, ...]) -> Update:
        """Update of blocks whose parameters all cost the same; searches ask for many."""
        cost, number, largest = self.cost, 0.0, 0.0
        for block in blocks:
            _, own = uneven_shards(block, self.shards)
            number += block.count * (own + (block.expert_parameters - block.frozen_experts) / self.expert_shards)
            if cost.workspace_of_one:
                trained = (weight for op in block.ops for weight in op.weights if weight.trains)
                largest = max(largest, *(weight.numbers / self._ranks(weight) for weight in trained), 0.0)
        besides = largest * cost.workspace_of_one
        return Update(
            number * cost.state, number * cost.traffic, number * cost.workspace + besides, number * cost.flops
        )

    def _each(self, block: BlockCost) -> Iterator[tuple[Update, float]]:
        """Updates of the weights of a block, each with the bytes while it is updated, and of what has no name."""
        assert self.cost.of_weight is not None
        left = {
            False: block.count * (block.parameters - block.frozen),
            True: block.count * (block.expert_parameters - block.frozen_experts),
        }
        names, count = (block.names, 1) if block.names else (("",), block.count)
        for weight in (weight for op in block.ops for weight in op.weights if weight.trains):
            of_bank = weight.kind == "bank"
            if not left[of_bank]:  # such as of a tied head, whose weight is counted elsewhere
                continue
            for name in names:
                whole = f"{name}.{weight.name}" if name else weight.name
                cost = self.cost.of_weight(whole, self._shape(weight))
                number, ranks = count * weight.numbers, self._ranks(weight)
                left[of_bank] -= number
                yield self._matrix(weight, number, cost), weight.numbers / ranks * cost.workspace_of_one
        yield self._update(left[False], self.shards, self.cost), 0.0
        yield self._update(left[True], self.expert_shards, self.cost), 0.0

    def _matrix(self, weight: Weight, number: float, cost: OptimizerCost) -> Update:
        """Update of alike weights, whose whole matrices may be computed in other places than their parts."""
        ranks = self._ranks(weight)
        update = self._update(number, ranks, cost)
        split = self.tensor if weight.cut is not None else 1
        if weight.kind == "bank" or not cost.exchanged or split * ranks == 1:  # banks are cut between matrices
            return update
        if split > 1 and ranks > 1:  # cut in two ways: each of its ranks computes all of it
            return update + Update(flops=(split * ranks - 1) * update.flops, exchanged=number * split * cost.exchanged)
        return update + Update(exchanged=number / ranks * cost.exchanged)  # in turns, each rank computes some matrices

    def _update(self, number: float, ranks: int, cost: OptimizerCost) -> Update:
        own = number / ranks
        return Update(own * cost.state, own * cost.traffic, own * cost.workspace, own * cost.flops)

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of a weight on all ranks of ``tp``."""
        return tuple(size * (self.tensor if dim == weight.cut else 1) for dim, size in enumerate(weight.shape))

    def _ranks(self, weight: Weight) -> int:
        return self.expert_shards if weight.kind == "bank" else self.shards


def uneven_shards(block: BlockCost, ranks: int) -> tuple[float, float]:
    """Parameters of a block, and those of them that train, on the rank with the most, without banks of experts.

    Shards are rows: of 257 over four ranks, the first has 65. Parameters that no op names count as if they were even.
    """
    largest, trained, left, left_trained = 0, 0, block.parameters, block.parameters - block.frozen
    for weight in (weight for op in block.ops for weight in op.weights if weight.kind != "bank"):
        if weight.numbers > left:  # such as of a tied head, whose weight is counted elsewhere
            continue
        rows = weight.shape[0] if weight.shape else 1
        own = -(-rows // ranks) * (weight.numbers // rows)
        largest, left = largest + own, left - weight.numbers
        if weight.trains:
            trained, left_trained = trained + own, left_trained - weight.numbers
    return largest + left / ranks, trained + max(0, left_trained) / ranks
