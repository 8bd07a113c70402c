"""Merging of low-rank terms as a state graph, so that any checkpoint can be merged tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from d9d_core.extend import TensorSpec
from d9d_weights import Compute, Identity, Mapper, Parallel
from torch import Tensor

from d9d_peft.lora.linear import LORA_A, LORA_B

_LINEAR, _BANK, _TERMS = f".{LORA_A}.weight", f".{LORA_A}", ".terms."
_Product = Callable[[Tensor, Tensor], Tensor]


def adapted_names(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Names of the linear layers and of the banks that have terms, from those of a model's tensors."""
    linears = [name.removesuffix(_LINEAR) for name in names if name.endswith(_LINEAR)]
    banks = [name.removesuffix(_BANK) for name in names if name.endswith(_BANK) and _TERMS in name]
    return linears, [".".join(name.rsplit(_TERMS, 1)) for name in banks]


def merger(linears: Iterable[str], banks: Iterable[str], scale: float) -> Mapper:
    """Mapper that folds terms into the weights that they belong to, and keeps everything else.

    Args:
        linears: linear layers whose terms to fold.
        banks: banks of experts whose terms to fold.
        scale: factor of the terms.
    """
    folded = [
        _fold(f"{layer}.weight", f"{layer}{_LINEAR}", f"{layer}.{LORA_B}.weight", lambda a, b: b @ a, scale)
        for layer in linears
    ]
    for name in banks:
        owner, _, bank = name.rpartition(".")
        term = f"{owner}{_TERMS}{bank}"
        folded.append(_fold(name, f"{term}{_BANK}", f"{term}.{LORA_B}", torch.bmm, scale))
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
