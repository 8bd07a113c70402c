"""Merging of low-rank terms as a state graph, so that any checkpoint can be merged tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from d9d_core.extend import TensorSpec
from d9d_weights import Compute, Identity, Mapper, Parallel
from torch import Tensor

from d9d_peft.lora.linear import LORA_A, LORA_B

_LINEAR, _BANK, _TERMS = f".{LORA_A}.weight", f".{LORA_A}", ".terms."
_Product = Callable[[Tensor, Tensor], Tensor]


def merger(names: Collection[str], scale: float) -> Mapper:
    """Mapper that folds each term into the weight that it belongs to, and keeps everything else.

    Args:
        names: of a model's tensors, terms included.
        scale: factor of the terms.
    """
    folded: list[Mapper] = []
    for name in names:
        if name.endswith(_LINEAR):
            layer = name.removesuffix(_LINEAR)
            folded.append(_fold(f"{layer}.weight", name, f"{layer}.{LORA_B}.weight", lambda a, b: b @ a, scale))
        elif name.endswith(_BANK) and _TERMS in name:
            owner, _, bank = name.removesuffix(_BANK).rpartition(_TERMS)
            second = f"{owner}{_TERMS}{bank}.{LORA_B}"
            folded.append(_fold(f"{owner}.{bank}", name, second, torch.bmm, scale))
    return Parallel(*folded, Identity())


def _fold(weight: str, first: str, second: str, product: _Product, scale: float) -> Mapper:
    def merged(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own = tensors[weight]
        wide = torch.promote_types(own.dtype, torch.float32)
        term = product(tensors[first].to(wide), tensors[second].to(wide))
        return {weight: (own.to(wide) + scale * term).to(own.dtype)}

    def shapes(specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {weight: specs[weight]}

    return Compute((weight, first, second), merged, shapes)
