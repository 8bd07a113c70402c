"""Comparison of tensors by bits, and detection of device values that the host reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from d9d_core.tensors import local
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"})


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records operators in which the host reads a tensor's value: ``item``, ``bool``, ``nonzero``, ``equal``.

    Other reads, such as ``tolist``, boolean indices and copies to the host, are not recorded.

    Attributes:
        found: names of the operators, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operator, and run it."""
        name = func.name().partition(".")[0]
        if name in _READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bytes of each tensor (of a DTensor: its local shard), copied; meta tensors are left out.

    In a comparison of bytes, NaN equals itself and -0 differs from 0.
    """
    here = {name: local(tensor).detach() for name, tensor in tensors.items() if not local(tensor).is_meta}
    return {name: tensor.clone().contiguous().reshape(-1).view(torch.uint8) for name, tensor in here.items()}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors differ, or that only one of the mappings has."""
    common = first.keys() & second.keys()
    changed = {name for name in common if not torch.equal(first[name], second[name])}
    return sorted(changed | (first.keys() ^ second.keys()))


def overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Names of two contiguous tensors of several elements that overlap in memory; ``None`` if there are none."""
    here = [(name, local(tensor)) for name, tensor in tensors.items()]
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in here
        if not tensor.is_meta and tensor.numel() > 1 and tensor.is_contiguous()
    )
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            return name, other
    return None


def facts(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor, by name."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
