"""Gather and all-gather of values with another size on every rank: tensors of any shapes, and JSON values.

Every function is collective over all ranks of its group, and all of them notice together when one of them cannot take
part, so that bad input is an error everywhere rather than a hang. ``group=None`` stands for a job of one process.

The results carry no gradients. Tensors travel as bytes, since not every backend knows every dtype.
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
# The longest name of a dtype has 16 characters.
_NAME_BYTES = 24
_HEADER = 1 + _MAX_DIMS + _NAME_BYTES // 8
# A part starts where any dtype may start.
_ALIGNMENT = 16


def all_gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather tensors: every rank's, by its rank in the group; collective over ``group``. Waits for the device.

    Args:
        tensor: any shape and number of dimensions, on the same kind of device everywhere; the group needs a backend for
            that device.
        group: who takes part.

    Returns:
        New tensors on the device of ``tensor``.

    Raises:
        ValueError: dtypes differ, or a tensor has more dimensions than 16; on all ranks.
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
    """Tensors of all ranks that are on their way. Made by :func:`start_all_gather`."""

    def __init__(self, received: list[Tensor], work: dist.Work | None) -> None:
        self._received = received
        self._work = work

    def wait(self) -> list[Tensor]:
        """Tensors by rank in the group, for use in the current stream; on a GPU, only that stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


def start_all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> PendingTensors:
    """Start to all-gather tensors of one shape; collective over ``group``. Does not wait for anything.

    Args:
        tensor: of the same shape and dtype on every rank, which is not checked; it must stay as it is until
            :meth:`PendingTensors.wait`.
        group: who takes part.
    """
    if group is None:
        return PendingTensors([tensor.detach().clone()], None)
    sent = tensor.detach().contiguous()
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    return PendingTensors(received, dist.all_gather(received, sent, group=group, async_op=True))


def gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None, dst: int = 0) -> list[Tensor] | None:
    """Gather every rank's tensor on one of them; collective over ``group``. Waits for the device.

    Args:
        tensor: as for :func:`all_gather_tensors`.
        group: who takes part.
        dst: who gets them, by its rank in the group.

    Returns:
        New tensors by rank in the group, on ``dst``; ``None`` elsewhere.

    Raises:
        ValueError: as for :func:`all_gather_tensors`, or the group has no such rank.
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
    """All-gather JSON values by rank in the group; collective over ``group``. Does not wait for the device.

    Args:
        value: what JSON can hold, NaN and infinity besides; tuples arrive as lists.
        group: who takes part; needs a backend for the CPU.

    Raises:
        TypeError: a value is not JSON; on all ranks, naming theirs.
    """
    return _decode(dict(enumerate(all_gather_tensors(_encode(value), group))), group)


def gather_objects(value: Json, group: dist.ProcessGroup | None, dst: int = 0) -> list[Any] | None:
    """Gather every rank's JSON value on one of them; collective over ``group``. Does not wait for the device.

    Args:
        value: as for :func:`all_gather_objects`.
        group: who takes part; needs a backend for the CPU.
        dst: who gets them, by its rank in the group.

    Returns:
        Values by rank in the group, on ``dst``; ``None`` elsewhere.

    Raises:
        TypeError: this rank's value is not JSON, or, on ``dst``, another's is not.
        ValueError: the group has no such rank.
    """
    _check_destination(group, dst)
    message = _encode(value)
    gathered = gather_tensors(message, group, dst)
    if gathered is None:
        _decode({dist.get_rank(group): message}, group)  # the rank at fault learns of it here
        return None
    return _decode(dict(enumerate(gathered)), group)


@dataclass(frozen=True, slots=True)
class _Part:
    """Message of a rank."""

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
    rows: list[list[int]] = received.view(ranks, _HEADER).tolist()  # the device is waited for here
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
    """uint8 [size], zeros at the end."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = flat.new_zeros(size)
    padded[: flat.numel()] = flat
    return padded


def _from_bytes(rows: Sequence[Tensor], parts: Sequence[_Part], dtype: torch.dtype) -> list[Tensor]:
    """Undo :func:`_to_bytes` for every rank."""
    # Copies, so that a small tensor does not keep the padding of all ranks alive.
    return [
        row[: math.prod(part.shape) * dtype.itemsize].view(dtype).reshape(part.shape).clone()
        for row, part in zip(rows, parts, strict=True)
    ]


def _encode(value: Json) -> Tensor:
    """uint8 [bytes]: ``=`` and the value, or ``!`` and why it is none: everyone has to learn of that."""
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
    """The json module would turn some keys into text without a word."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, which is no text")
            _check_json(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            _check_json(child, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{path} is a {type(value).__name__}")


def _check_destination(group: dist.ProcessGroup | None, dst: int) -> None:
    ranks = 1 if group is None else dist.get_world_size(group)
    if not 0 <= dst < ranks:
        raise ValueError(f"dst: there is no rank {dst} in a group of {ranks}; it counts from 0 inside the group")


def _by_rank(values: Sequence[object], group: dist.ProcessGroup) -> str:
    return ", ".join(f"rank {_name(group, rank)} has {value}" for rank, value in enumerate(values))


def _name(group: dist.ProcessGroup | None, rank: int) -> int:
    """Global rank of a rank of the group."""
    return 0 if group is None else dist.get_process_group_ranks(group)[rank]
