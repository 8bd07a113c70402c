"""Comparison of tensors by bits, and detection of device values that the host reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Self

import torch
from d9d_core.tensors import local
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that wait for the device, whatever their arguments.
_READS = frozenset({
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::allclose",
    "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount", "aten::_linalg_check_errors", "aten::_linalg_eigh",
    "aten::_linalg_svd",
})  # fmt: skip
#: Operators that wait if an index is a mask, because the number of elements depends on its values.
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
#: Methods whose reads of values are not operators.
_METHODS = frozenset({
    Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__,
})  # fmt: skip


class HostReads:
    """Context that records calls in which the host reads values of a tensor, and so waits for a device.

    These are ``item`` and conversions to Python numbers, ``tolist``, ``numpy``, ``repr``, ``torch.tensor`` of a list of
    tensors, copies to the CPU (``cpu()``, ``to("cpu")``), ``equal``, ``allclose``, and results whose sizes depend on
    values: ``nonzero``, masks as indices, ``masked_select``, ``unique``, ``bincount``, ``repeat_interleave`` without
    ``output_size``. The tensors may be on the CPU. Not recorded: non-blocking copies, ``to(torch.device)``, ``copy_``,
    and other threads.

    Attributes:
        found: names of the operators and methods, in order.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        """Begin to record."""
        self._modes.enter_context(_Methods(self.found))
        self._modes.enter_context(_Operators(self.found))
        return self

    def __exit__(self, *_: object) -> None:
        """End recording."""
        self._modes.close()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _READS or (name in _INDEXING and _reads_a_mask(*args)) or _needs_a_size(func, kwargs or {}):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func is Tensor.to and _copies_to_host(*args[1:], **kwargs)
        if func in _METHODS or to_host or (func is torch.tensor and _lists_tensors(*args[:1])):
            self._found.append(func.__name__)
        elif func is Tensor.__setitem__ and isinstance(args[2], Tensor) and args[2].numel() == 1:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_mask, indices)):  # a number is filled in without waiting, a tensor of one element is not
                self._found.append("__setitem__")
        return func(*args, **kwargs)


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _reads_a_mask(_tensor: Tensor, indices: Sequence[Tensor | None], values: Tensor | None = None, *_: object) -> bool:
    return any(map(_is_mask, indices)) and (values is None or values.numel() != 1)


def _needs_a_size(func: Any, kwargs: Mapping[str, Any]) -> bool:
    return func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _lists_tensors(data: object = None) -> bool:
    return isinstance(data, list | tuple) and any(isinstance(value, Tensor) for value in data)


def _copies_to_host(
    device: object = None, _dtype: object = None, non_blocking: bool = False, *_: object, **__: object
) -> bool:
    return isinstance(device, str) and torch.device(device).type == "cpu" and not non_blocking


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
