"""Costs of an optimizer's update on one rank. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from d9d_core.cost import BlockCost, OptimizerCost, Weight


@dataclass(frozen=True, slots=True)
class Update:
    """Cost of an optimizer's update of some parameters on one rank.

    Attributes:
        state: bytes of the optimizer's state.
        traffic: bytes that are read and written.
        workspace: temporary bytes during the update.
        flops: FLOPs of matrix products.
        exchanged: bytes sent to ranks that update full matrices; the same number is received.
    """

    state: float = 0.0
    traffic: float = 0.0
    workspace: float = 0.0
    flops: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: Update) -> Update:
        """Sum of two costs."""
        return Update(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Updates:
    """Costs of an optimizer's updates in one layout.

    Attributes:
        cost: cost description of the optimizer.
        shards, expert_shards: number of ranks over which a parameter, or an expert's parameter, is sharded.
        tensor: number of ranks of ``tp``.
    """

    cost: OptimizerCost
    shards: int
    expert_shards: int
    tensor: int

    def of(self, blocks: Iterable[BlockCost]) -> Update:
        """Cost of updating all trained parameters of some blocks on one rank."""
        if self.cost.of_weight is None:
            return self._uniform_update(tuple(blocks))
        parts = [part for block in blocks for part in self._weight_updates(block)]
        largest = max((one for _, one in parts), default=0.0)
        return sum((update for update, _ in parts), Update(workspace=largest))

    def _uniform_update(self, blocks: tuple[BlockCost, ...]) -> Update:
        """Cost of updating blocks if all parameters cost the same; fast, because searches call it often."""
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

    def _weight_updates(self, block: BlockCost) -> Iterator[tuple[Update, float]]:
        """Cost of updating each weight of a block, with its temporary bytes; then of parameters that no op lists."""
        assert self.cost.of_weight is not None
        left = {
            False: block.count * (block.parameters - block.frozen),
            True: block.count * (block.expert_parameters - block.frozen_experts),
        }
        names, count = (block.names, 1) if block.names else (("",), block.count)
        for weight in (weight for op in block.ops for weight in op.weights if weight.trains):
            of_bank = weight.kind == "bank"
            if not left[of_bank]:  # such as a tied head, whose weight is counted elsewhere
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
        """Cost of updating ``number`` elements of equal weights, whose full matrices may have to be sent to a rank."""
        ranks = self._ranks(weight)
        update = self._update(number, ranks, cost)
        split = self.tensor if weight.cut is not None else 1
        # Shards of stacked expert weights hold full matrices, so nothing is sent for them.
        if weight.kind == "bank" or not cost.exchanged or split * ranks == 1:
            return update
        if split > 1 and ranks > 1:  # sharded over tp and data: each rank updates the full matrix
            return update + Update(flops=(split * ranks - 1) * update.flops, exchanged=number * split * cost.exchanged)
        # each rank updates some of the matrices in full, for all ranks
        return update + Update(exchanged=number / ranks * cost.exchanged)

    def _update(self, number: float, ranks: int, cost: OptimizerCost) -> Update:
        own = number / ranks
        return Update(own * cost.state, own * cost.traffic, own * cost.workspace, own * cost.flops)

    def _shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of a weight without sharding over ``tp``."""
        return tuple(size * (self.tensor if dim == weight.cut else 1) for dim, size in enumerate(weight.shape))

    def _ranks(self, weight: Weight) -> int:
        return self.expert_shards if weight.kind == "bank" else self.shards


def uneven_shards(block: BlockCost, ranks: int) -> tuple[float, float]:
    """Numbers of parameters, and of trained parameters, of a block's largest shard; experts are left out.

    Rows are sharded unevenly: of 257 rows over four ranks, the first has 65. Parameters that no op lists in its weights
    are counted as evenly sharded.
    """
    largest, trained, left, left_trained = 0, 0, block.parameters, block.parameters - block.frozen
    for weight in (weight for op in block.ops for weight in op.weights if weight.kind != "bank"):
        if weight.numbers > left:  # such as a tied head, whose weight is counted elsewhere
            continue
        rows = weight.shape[0] if weight.shape else 1
        own = -(-rows // ranks) * (weight.numbers // rows)
        largest, left = largest + own, left - weight.numbers
        if weight.trains:
            trained, left_trained = trained + own, left_trained - weight.numbers
    return largest + left / ranks, trained + max(0, left_trained) / ranks
