"""Gather and all-gather of values whose size differs between ranks: tensors of any shapes, and JSON values.

Every function is collective over all ranks of its group. If the input of a rank is invalid, all ranks raise an error
instead of waiting for ever. ``group=None`` is for a job of one process.

The results carry no gradients. Tensors are sent as bytes, because not every backend supports every dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.types import Json
from torch import Tensor
from torch import distributed as dist

__all__ = [
    "PendingTensors", "all_gather_objects", "all_gather_tensors", "gather_objects", "gather_tensors",
    "start_all_gather",
]  # fmt: skip

_MAX_DIMS = 16
# Bytes for the name of a dtype, the longest of which has 16 characters.
_NAME_BYTES = 24
_HEADER = 1 + _MAX_DIMS + _NAME_BYTES // 8
# Each tensor's bytes start at a multiple of this, the largest alignment of a dtype.
_ALIGNMENT = 16


def all_gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather tensors of any shapes, in rank order. Collective over ``group``; synchronizes with the device.

    Args:
        tensor: any shape and number of dimensions, on the same kind of device on all ranks; the group needs a backend
            for this device.
        group: process group; ``None`` for one process.

    Returns:
        New tensors on the device of ``tensor``.

    Raises:
        ValueError: dtypes differ, or a tensor has more than 16 dimensions; on all ranks.
    """
    if group is None:
        return [tensor.detach().clone()]
    parts = _exchange_headers(tensor, group)
    size = max(part.bytes for part in parts)
    if not size:
        return [tensor.new_empty(part.shape) for part in parts]
    received = torch.empty(len(parts) * size, dtype=torch.uint8, device=tensor.device)
    dist.all_gather_into_tensor(received, _to_bytes(tensor, size), group=group)
    return _from_bytes(received.view(len(parts), size).unbind(), parts, tensor.dtype)


class PendingTensors:
    """All-gather that may still run, with its results. Made by :func:`start_all_gather`."""

    def __init__(self, received: list[Tensor], work: dist.Work | None) -> None:
        self._received = received
        self._work = work

    def wait(self) -> list[Tensor]:
        """Tensors in rank order, for use in the current stream; on a GPU, only this stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


def start_all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> PendingTensors:
    """Start an all-gather of tensors of equal shape. Collective over ``group``; does not wait.

    Args:
        tensor: the same shape and dtype on every rank, which is not checked; it must not change until
            :meth:`PendingTensors.wait`.
        group: process group; ``None`` for one process.
    """
    if group is None:
        return PendingTensors([tensor.detach().clone()], None)
    sent = tensor.detach().contiguous()
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    return PendingTensors(received, dist.all_gather(received, sent, group=group, async_op=True))


def gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None, dst: int = 0) -> list[Tensor] | None:
    """Gather tensors of any shapes on one rank. Collective over ``group``; synchronizes with the device.

    Args:
        tensor: any shape and at most 16 dimensions; the same dtype and kind of device on all ranks.
        group: process group; ``None`` for one process.
        dst: destination, as a rank of the group.

    Returns:
        New tensors in rank order on ``dst``; ``None`` on other ranks.

    Raises:
        ValueError: dtypes differ, or a tensor has more than 16 dimensions, on all ranks; or the group has no rank
            ``dst``.
    """
    _check_destination(group, dst)
    if group is None:
        return [tensor.detach().clone()]
    parts = _exchange_headers(tensor, group)
    is_destination = dist.get_rank(group) == dst
    size = max(part.bytes for part in parts)
    if not size:
        return [tensor.new_empty(part.shape) for part in parts] if is_destination else None
    sent = _to_bytes(tensor, size)
    received = [torch.empty_like(sent) for _ in parts] if is_destination else None
    dist.gather(sent, received, group=group, group_dst=dst)
    return None if received is None else _from_bytes(received, parts, tensor.dtype)


def all_gather_objects(value: Json, group: dist.ProcessGroup | None) -> list[Any]:
    """All-gather JSON values, in rank order. Collective over ``group``; does not synchronize with the device.

    Args:
        value: JSON value; NaN and infinity are allowed, tuples arrive as lists.
        group: process group with a backend for the CPU; ``None`` for one process.

    Raises:
        TypeError: a value is not JSON; on all ranks, with the ranks at fault.
    """
    return _decode(dict(enumerate(all_gather_tensors(_encode(value), group))), group)


def gather_objects(value: Json, group: dist.ProcessGroup | None, dst: int = 0) -> list[Any] | None:
    """Gather JSON values on one rank. Collective over ``group``; does not synchronize with the device.

    Args:
        value: JSON value; NaN and infinity are allowed, tuples arrive as lists.
        group: process group with a backend for the CPU; ``None`` for one process.
        dst: destination, as a rank of the group.

    Returns:
        Values in rank order on ``dst``; ``None`` on other ranks.

    Raises:
        TypeError: this rank's value is not JSON, or, on ``dst``, any rank's value.
        ValueError: the group has no rank ``dst``.
    """
    _check_destination(group, dst)
    message = _encode(value)
    gathered = gather_tensors(message, group, dst)
    if gathered is None:
        _decode({dist.get_rank(group): message}, group)  # raises on the rank at fault
        return None
    return _decode(dict(enumerate(gathered)), group)


@dataclass(frozen=True, slots=True)
class _Part:
    """Shape and padded bytes of one rank's tensor."""

    shape: tuple[int, ...]
    bytes: int


def _exchange_headers(tensor: Tensor, group: dist.ProcessGroup) -> list[_Part]:
    ranks = dist.get_world_size(group)
    name = str(tensor.dtype).removeprefix("torch.").encode()
    words = [int.from_bytes(name[i : i + 8].ljust(8, b"\0"), "little", signed=True) for i in range(0, _NAME_BYTES, 8)]
    shape = [*tensor.shape[:_MAX_DIMS]]
    header = torch.tensor([tensor.ndim, *shape, *[0] * (_MAX_DIMS - len(shape)), *words], device=tensor.device)
    received = header.new_empty(ranks * _HEADER)
    dist.all_gather_into_tensor(received, header, group=group)
    rows: list[list[int]] = received.view(ranks, _HEADER).tolist()  # synchronizes with the device
    dtypes = [b"".join(w.to_bytes(8, "little", signed=True) for w in row[-3:]).rstrip(b"\0").decode() for row in rows]
    if len(set(dtypes)) > 1:
        raise ValueError(f"cannot gather tensors of different dtypes: {_by_rank(dtypes, group)}; convert them to one")
    dims = [row[0] for row in rows]
    if max(dims) > _MAX_DIMS:
        raise ValueError(
            f"cannot gather tensors of more than {_MAX_DIMS} dimensions: {_by_rank(dims, group)}; flatten them"
        )
    shapes = [tuple(row[1 : 1 + row[0]]) for row in rows]
    aligned = [math.ceil(math.prod(shape) * tensor.itemsize / _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    return [_Part(shape, size) for shape, size in zip(shapes, aligned, strict=True)]


def _to_bytes(tensor: Tensor, size: int) -> Tensor:
    """Bytes of a tensor, uint8 [size], padded with zeros."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = flat.new_zeros(size)
    padded[: flat.numel()] = flat
    return padded


def _from_bytes(rows: Sequence[Tensor], parts: Sequence[_Part], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of all ranks from their gathered bytes, the inverse of :func:`_to_bytes`."""
    # The tensors are copied, so that a small one does not keep the padding of all ranks in memory.
    return [
        row[: math.prod(part.shape) * dtype.itemsize].view(dtype).reshape(part.shape).clone()
        for row, part in zip(rows, parts, strict=True)
    ]


def _encode(value: Json) -> Tensor:
    """Message, uint8 [bytes]: ``=`` and the value, or ``!`` and the error, which all ranks must learn."""
    try:
        _check_json(value, "value")
        text = "=" + json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"!{error}"
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decode(messages: Mapping[int, Tensor], group: dist.ProcessGroup | None) -> list[Any]:
    texts = {rank: message.numpy().tobytes().decode() for rank, message in messages.items()}
    problems = [f"rank {_name(group, rank)}: {text[1:]}" for rank, text in texts.items() if text[0] == "!"]
    if problems:
        raise TypeError(f"only JSON values can be gathered; {'; '.join(problems)}")
    return [json.loads(text[1:]) for text in texts.values()]


def _check_json(value: object, path: str) -> None:
    """Refuse values that the json module would convert silently, such as keys that are not strings."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, not a string")
            _check_json(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            _check_json(child, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{path} is a {type(value).__name__}")


def _check_destination(group: dist.ProcessGroup | None, dst: int) -> None:
    ranks = 1 if group is None else dist.get_world_size(group)
    if not 0 <= dst < ranks:
        raise ValueError(
            f"dst is {dst}, but the group has {ranks} rank(s); give a rank of the group, from 0 to {ranks - 1}"
        )


def _by_rank(values: Sequence[object], group: dist.ProcessGroup) -> str:
    return ", ".join(f"rank {_name(group, rank)} has {value}" for rank, value in enumerate(values))


def _name(group: dist.ProcessGroup | None, rank: int) -> int:
    """Name of a rank of the group in messages: its global rank."""
    return 0 if group is None else dist.get_process_group_ranks(group)[rank]
