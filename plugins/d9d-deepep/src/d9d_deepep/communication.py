"""Estimate of DeepEP's communication in a step, from the shapes of tensors.

DeepEP's kernels are not torch collectives, so tools that record collectives do not see them. The estimated number of
calls is exact; the sizes assume that the router chooses all experts equally often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from d9d_core.strategy import Collective, StepShape
from d9d_core.traits import HasExperts
from d9d_moe.expert_parallel.communication import features_of, rows_of_token
from torch import nn

#: Bytes of an element of a token (bfloat16), of an expert index (int64) and of an expert weight (float32).
_ROW, _EXPERT, _WEIGHT = 2, 8, 4


@dataclass(frozen=True)
class DeepEPCommunication:
    """Communication (:class:`d9d_core.strategy.Communication`) of a stage that dispatches tokens by DeepEP.

    Attributes:
        stage: stage with the layers.
        layers: layers with experts, by qualified name.
        experts: number of experts of each layer over all ranks.
        ranks: global indices of the ranks of ``ep``.
        split: number of ranks of ``tp``; each sends the tokens of its share of the positions.
    """

    stage: nn.Module
    layers: Mapping[str, HasExperts]
    experts: Mapping[str, int]
    ranks: tuple[int, ...]
    split: int

    def __call__(self, step: StepShape) -> Iterator[Collective]:
        """List dispatches and combines of all layers. If a parameter is frozen, backward counts are upper bounds."""
        frozen = any(not parameter.requires_grad for parameter in self.stage.parameters())
        for name, layer in self.layers.items():
            rows, labels, weights = self._sizes(name, layer, step)
            for size, what in ((_sum(rows, labels), "tokens"), (rows, "outputs")):
                yield self._call(size, step.forwards, f"{what} of {name} by DeepEP, forward", module=name)
            for size, what in ((rows, "outputs"), (_sum(rows, weights), "tokens")):
                purpose = f"gradients of {what} of {name} by DeepEP, backward"
                yield self._call(size, step.backwards, purpose, at_most=frozen)

    def _sizes(self, name: str, layer: HasExperts, step: StepShape) -> tuple[int | None, int | None, int | None]:
        """Estimated bytes that a dispatch sends: of tokens; of expert indices and weights; of weights alone.

        ``None`` if unknown.
        """
        chosen = getattr(getattr(layer, "router", None), "top_k", None)
        if chosen is None:
            return None, None, None
        travels, features = rows_of_token(len(self.ranks), self.experts[name], chosen) / self.split, features_of(layer)
        rows = None if features is None else step.bytes_of(travels * features, _ROW)
        return rows, step.bytes_of(travels * chosen, _EXPERT + _WEIGHT), step.bytes_of(travels * chosen, _WEIGHT)

    def _call(
        self, size: int | None, count: int, purpose: str, *, module: str | None = None, at_most: bool = False
    ) -> Collective:
        return Collective(
            "all_to_all", "ep", self.ranks, size, count, purpose, module, approximate=True, at_most=at_most
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
