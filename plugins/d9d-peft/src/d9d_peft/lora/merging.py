"""Merging of low-rank terms as a state graph, so that any checkpoint can be merged tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from d9d_core.extend import TensorSpec
from d9d_weights import Compute, Identity, Mapper, Parallel
from torch import Tensor

from d9d_peft.lora.banks import merged_bank
from d9d_peft.lora.linear import LORA_A, LORA_B, merged_weight

_LINEAR, _BANK, _TERMS = f".{LORA_A}.weight", f".{LORA_A}", ".terms."


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
        fold(f"{layer}.weight", factors_of(layer), lambda weight, a, b: merged_weight(weight, a, b, scale))
        for layer in linears
    ]
    for name in banks:
        owner, _, bank = name.rpartition(".")
        term = f"{owner}{_TERMS}{bank}"
        folded.append(
            fold(name, (f"{term}{_BANK}", f"{term}.{LORA_B}"), lambda weight, a, b: merged_bank(weight, a, b, scale))
        )
    return Parallel(*folded, Identity())


def factors_of(layer: str) -> tuple[str, str]:
    """Names of the factors of a linear layer's term."""
    return f"{layer}{_LINEAR}", f"{layer}.{LORA_B}.weight"


def fold(weight: str, added: tuple[str, ...], merged: Callable[..., Tensor]) -> Mapper:
    """Mapper that replaces a weight and what a method added to it by what both amount to.

    Args:
        weight: its name, before and afterwards.
        added: names of what goes away.
        merged: function of the weight and these, in order.
    """

    def function(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {weight: merged(tensors[weight], *(tensors[name] for name in added))}

    def shapes(specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        return {weight: specs[weight]}

    return Compute((weight, *added), function, shapes)
