"""Costs of attention whose positions are split over ranks of ``cp``. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from d9d_core.cost import BlockCost, ContextCost, OpCost, StageCost


def shared(stage: StageCost, cost: Callable[[OpCost, int], ContextCost], ranks: int) -> StageCost:
    """Cost of a stage with the changes that the context-parallel strategy makes to each attention.

    Args:
        stage: cost without communication over ``cp``.
        cost: function from an attention and a number of ranks to the changed cost.
        ranks: number of ranks of ``cp``.
    """
    return replace(stage, blocks=tuple(_block(block, cost, ranks) for block in stage.blocks))


def _block(block: BlockCost, cost: Callable[[OpCost, int], ContextCost], ranks: int) -> BlockCost:
    for index, op in enumerate(block.ops):
        if op.attention is not None:
            found = cost(op, ranks)
            block = replace(
                block,
                ops=(*block.ops[:index], *found.ops, *block.ops[index + 1 :]),
                workspace=block.workspace + found.workspace,
                exchanges=(*block.exchanges, *found.exchanges),
                backward_exchanges=(*block.backward_exchanges, *found.backward_exchanges),
                beside=(*block.beside, *found.beside),
                backward_beside=(*block.backward_beside, *found.backward_beside),
            )
            break  # a block has one attention
    return block
