"""Mappers (a state graph) that merge low-rank updates into weights, so that checkpoints are merged tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.compute import Compute
from torch import Tensor

from d9d_peft.lora.banks import merged_bank
from d9d_peft.lora.linear import LORA_A, LORA_B, merged_weight
from d9d_peft.lora.vocabulary import EMBEDDING_A, EMBEDDING_B, HEAD_A, HEAD_B, merged_embedding

#: In the name of an expert update: text between the name of the experts' module and the name of the expert weight.
TERMS = ".terms."
#: First factor -> second factor, and the function (weight, factors, scale) that merges them.
_MERGED: Mapping[str, tuple[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]]] = {
    f"{LORA_A}.weight": (f"{LORA_B}.weight", merged_weight),
    f"{HEAD_A}.weight": (f"{HEAD_B}.weight", merged_weight),
    f"{EMBEDDING_A}.weight": (f"{EMBEDDING_B}.weight", merged_embedding),
    LORA_A: (LORA_B, merged_bank),
}


class Term(NamedTuple):
    """Low-rank update, described by the names of its tensors in a checkpoint.

    Attributes:
        owner: name of the adapted layer, or of the adapted stacked expert weight.
        is_linear: whether the owner is a linear layer.
        weight: name of the weight.
        factors: names of the factors A and B.
        merged: function of weight, both factors and scale that returns the merged weight.
    """

    owner: str
    is_linear: bool
    weight: str
    factors: tuple[str, str]
    merged: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def terms_of(names: Iterable[str]) -> Iterator[Term]:
    """Find the low-rank updates among the names of a model's tensors."""
    for name in names:
        for first, (second, merged) in _MERGED.items():
            layer = name.removesuffix(f".{first}")
            if layer == name or (merged is merged_bank and TERMS not in name):
                continue
            factors = name, f"{layer}.{second}"
            if merged is merged_bank:
                bank = ".".join(layer.rsplit(TERMS, 1))
                yield Term(bank, False, bank, factors, merged)
            else:
                yield Term(layer, first == f"{LORA_A}.weight", f"{layer}.weight", factors, merged)


def fold(weight: str, added: tuple[str, ...], merged: Callable[..., Tensor]) -> Mapper:
    """Mapper that replaces a weight and the tensors that a method added to it by the merged weight.

    Args:
        weight: name of the weight, which the merged weight keeps.
        added: names of the added tensors, which are removed.
        merged: function of the weight and the added tensors, in order, that returns the merged weight.
    """

    def function(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {weight: merged(tensors[weight], *(tensors[name] for name in added))}

    def shapes(specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {weight: specs[weight]}

    return Compute((weight, *added), function, shapes)
