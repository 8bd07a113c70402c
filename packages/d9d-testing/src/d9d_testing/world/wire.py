"""Serialisation between a test and its ranks: plain data and copies of tensors.

With multiprocessing's own serialisation, tensors would share memory between ranks, so that one rank's in-place
operations would affect others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Path)
_CONTAINERS = (list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class _Packed:
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


def pack(value: Any, where: str = "value") -> Any:
    """Replace tensors in ``value`` by copies that any process can unpack.

    Raises:
        TypeError: a nested value is neither plain data nor a dense tensor; the text names it.
    """
    if type(value) in _PLAIN or isinstance(value, Path):
        return value
    if isinstance(value, DTensor):
        raise TypeError(f"{where} is a DTensor; send its to_local() or full_tensor()")
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value.detach().cpu())
    if type(value) is torch.Size:
        return tuple(value)
    return _walk(value, pack, where)


def unpack(value: Any, where: str = "value") -> Any:
    """Inverse of :func:`pack`."""
    if isinstance(value, _Packed):
        # frombuffer refuses empty buffers, hence the extra byte; a bytearray gives a writable tensor.
        flat = torch.frombuffer(bytearray(value.data + b"\0"), dtype=torch.uint8)[: len(value.data)].clone()
        return flat.view(value.dtype).reshape(value.shape)
    if isinstance(value, (dict, *_CONTAINERS)):
        return _walk(value, unpack, where)
    return value


def _pack_tensor(tensor: torch.Tensor) -> _Packed:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    data = ctypes.string_at(flat.data_ptr(), len(flat)) if len(flat) else b""  # not by numpy, which may be missing
    return _Packed(tensor.dtype, tuple(tensor.shape), data)


def _walk(value: Any, visit: Callable[[Any, str], Any], where: str) -> Any:
    if type(value) is dict:
        return {visit(key, f"{where} key"): visit(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)([visit(item, f"{where}[{index}]") for index, item in enumerate(value)])
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{where} is a {kind}; ranks accept and return plain data (dicts, lists, numbers, text) and tensors"
    )
