"""Collectives of expert parallelism in a step, predicted from shapes.

The router decides to which ranks a token is sent, so the sizes are expected values for equally likely experts; the
numbers of collectives are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from d9d_core.strategy import Collective, StepShape
from d9d_core.traits import Dispatcher, HasBanks, HasExperts
from torch import nn

from d9d_moe.all_to_all.separate import SeparateDispatcher

#: Bytes of a number in the exchange of row counts.
_COUNT = 8


@dataclass(frozen=True)
class ExpertCommunication:
    """Communication (:class:`d9d_core.strategy.Communication`) of expert parallelism: tokens are sent by all-to-all.

    Attributes:
        layers: layers with experts by qualified name, each with the dispatcher that this strategy gave it. A layer is
            skipped if another strategy has replaced its dispatcher.
        experts: number of experts of each layer on all ranks.
        ranks: ranks along ``ep``.
        split: number of ranks of ``tp``, over which the positions are split.
    """

    layers: Mapping[str, tuple[HasExperts, Dispatcher]]
    experts: Mapping[str, int]
    ranks: tuple[int, ...]
    split: int

    def __call__(self, step: StepShape) -> Iterator[Collective]:
        """List the exchanges of all layers, forward and backward."""
        for name, (layer, dispatcher) in self.layers.items():
            if layer.dispatcher is dispatcher and len(self.ranks) > 1:
                yield from self._of_layer(name, layer, step)

    def _of_layer(self, name: str, layer: HasExperts, step: StepShape) -> Iterator[Collective]:
        router = getattr(layer, "router", None)
        chosen, limit = getattr(router, "top_k", None), getattr(router, "capacity", None)
        features = features_of(layer)
        rows = labels = weights = None
        if chosen is not None:
            separate = isinstance(layer.dispatcher, SeparateDispatcher)
            travels = chosen if separate else rows_of_token(len(self.ranks), self.experts[name], chosen)
            each, wide = 1 if separate else chosen, max(step.itemsize, 4)
            rows = None if features is None else step.bytes_of(travels / self.split * features)
            labels = step.bytes_of(travels / self.split * 2 * each, wide)
            weights = step.bytes_of(travels / self.split * each, wide)
        numbers = (1 if limit is None else 3) + self.experts[name] // len(self.ranks)
        counts = _COUNT * numbers * len(self.ranks)
        yield Collective("all_to_all", "ep", self.ranks, counts, step.forwards, f"row counts of {name}", name)
        for what, size in (("tokens", rows), ("labels", labels), ("outputs", rows)):
            yield self._exchange(size, step.forwards, f"{what} of {name}, forward", name)
        for what, size in (("outputs", rows), ("tokens", rows), ("weights", weights)):
            yield self._exchange(size, step.backwards, f"gradients of {what} of {name}, backward", None)

    def _exchange(self, size: int | None, count: int, what: str, module: str | None) -> Collective:
        return Collective("all_to_all", "ep", self.ranks, size, count, what, module, approximate=True)


def rows_of_token(ranks: int, experts: int, chosen: int) -> float:
    """Expected number of ranks to which a token is sent, if all experts are equally likely.

    Args:
        ranks: number of ranks, each with the same number of experts.
        experts: number of experts on all ranks.
        chosen: number of experts of a token.
    """
    elsewhere = math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)
    return ranks * (1 - elsewhere)


def features_of(layer: HasExperts) -> int | None:
    """Number of input features of a layer's experts; ``None`` if their modules do not declare their weights."""
    for bank in layer.expert_banks().values():
        for module in bank.modules():
            if isinstance(module, HasBanks) and isinstance(module, nn.Module):
                return next(iter(module.banks().values())).shape[1]
    return None
