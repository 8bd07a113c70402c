"""Dispatchers with one fault each, for the tests of the suite."""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.traits import Dispatched
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.dispatch.local import CompletedTransfer, LocalDispatcher
from d9d_moe.router.routing import TopKRouting
from torch import Tensor


class Broken:
    """A dispatcher that changes what goes in or comes out."""

    def __init__(self, group: Any, experts: int) -> None:
        alone = group.size() == 1
        self.inner = LocalDispatcher() if alone else AllToAllDispatcher(group, experts)

    def dispatch(self, tokens: Tensor, routing: TopKRouting) -> CompletedTransfer[Dispatched]:
        return CompletedTransfer(self.arrived(self.inner.dispatch(*self.leaving(tokens, routing)).wait()))

    def leaving(self, tokens: Tensor, routing: TopKRouting) -> tuple[Tensor, TopKRouting]:
        return tokens, routing

    def arrived(self, sent: Dispatched) -> Dispatched:
        return sent

    def combine(self, outputs: Tensor, handle: Any) -> CompletedTransfer[Tensor]:
        return CompletedTransfer(self.summed(self.inner.combine(outputs, handle).wait()))

    def summed(self, total: Tensor) -> Tensor:
        return total


def routed(routing: TopKRouting, weights: Tensor) -> TopKRouting:
    return TopKRouting(
        routing.indices, weights, routing.scores, routing.counts, routing.limit, incomplete=routing.incomplete
    )


class Sound(Broken):
    pass


class DoublesTheGradientOfTokens(Broken):
    def leaving(self, tokens: Tensor, routing: TopKRouting) -> tuple[Tensor, TopKRouting]:
        return 2 * tokens - tokens.detach(), routing


class ForgetsTheGradientOfWeights(Broken):
    def leaving(self, tokens: Tensor, routing: TopKRouting) -> tuple[Tensor, TopKRouting]:
        return tokens, routed(routing, routing.weights.detach())


class Averages(Broken):
    def leaving(self, tokens: Tensor, routing: TopKRouting) -> tuple[Tensor, TopKRouting]:
        return tokens, routed(routing, routing.weights / routing.indices.shape[1])


class ChangesTokens(Broken):
    def leaving(self, tokens: Tensor, routing: TopKRouting) -> tuple[Tensor, TopKRouting]:
        kept = tokens.clone()
        tokens.data.add_(1)
        return kept, routing


class HidesSpareRows(Broken):
    def arrived(self, sent: Dispatched) -> Dispatched:
        return sent._replace(spare_rows=False)


class CountsTooMany(Broken):
    def arrived(self, sent: Dispatched) -> Dispatched:
        return sent._replace(counts=sent.counts + 1)


class Widens(Broken):
    def summed(self, total: Tensor) -> Tensor:
        return total.double()


class HasABufferOfFewRows(Broken):
    """Enough rows for an even routing, and nothing says when more arrive."""

    def arrived(self, sent: Dispatched) -> Dispatched:
        rows = torch.arange(len(sent.tokens))
        return sent._replace(tokens=torch.where((rows < 24)[:, None], sent.tokens, 0 * sent.tokens))


class KeepsTheLastHandle(Broken):
    """Combines with the handle of the last dispatch, also where two microbatches are under way."""

    last: Any = None

    def arrived(self, sent: Dispatched) -> Dispatched:
        self.last = sent.handle
        return sent

    def combine(self, outputs: Tensor, handle: Any) -> CompletedTransfer[Tensor]:
        return super().combine(outputs, self.last)


class LeavesThingsToChance(Broken):
    def summed(self, total: Tensor) -> Tensor:
        return total * (1 + 1e-3 * torch.rand(1))
