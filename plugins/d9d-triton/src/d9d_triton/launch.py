"""Launch helpers: shapes and strides in the form that kernels take, the device, and the number of programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from d9d_triton import support

#: Dtypes that the kernels read; they compute in float32.
FLOATS = tuple(getattr(torch, name) for name in support.FLOATS)
#: Compiler options: fused multiply-add is set, because Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": True}
#: Threads in a warp.
WARP = 32
#: Programs per multiprocessor for a kernel that loops over its work: enough to hide the latency of loads.
_PROGRAMS_EACH = 4
#: Number of programs without a GPU, where Triton's interpreter runs one program after the other.
_MULTIPROCESSORS_INTERPRETED = 2
#: Number of cached tables. In most jobs, the tensor sizes of a group are the same in each step.
_TABLES = 32


class Blocks:
    """Tables that assign the blocks of one launch to many tensors; a limited number of tables is cached.

    Args:
        size: elements of a block, which one program handles.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Index of the tensor of each program, and index of the first program of each tensor; both int32.

        Args:
            sizes: numbers of elements of the tensors.
            device: device of the tables; must be the same in all calls.
        """
        if sizes not in self._tables:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            self._tables[sizes] = self._divide(sizes, device)
        return self._tables[sizes]

    def _divide(self, sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([cdiv(size, self._size) for size in sizes])
        owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
        firsts = (counts.cumsum(0) - counts).to(torch.int32)
        if device.type == "cuda":
            owners, firsts = owners.pin_memory(), firsts.pin_memory()
        return owners.to(device, non_blocking=True), firsts.to(device, non_blocking=True)


def cdiv(number: int, divisor: int) -> int:
    """Quotient of two positive integers, rounded up; ``triton.cdiv`` takes 1.4 us."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Smallest power of two >= a positive integer; ``triton.next_power_of_2`` takes 1.4 us."""
    return 1 << (number - 1).bit_length()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context manager that makes the tensor's GPU current, because Triton launches on the current GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def persistent_programs(tensor: Tensor, most: int, each: int = _PROGRAMS_EACH) -> int:
    """Number of programs for a kernel that loops over its work; depends only on the device and the arguments.

    Args:
        tensor: tensor on the device.
        most: number of work items.
        each: programs per multiprocessor.
    """
    count = _MULTIPROCESSORS_INTERPRETED
    if tensor.is_cuda:
        count = _multiprocessors(tensor.device) * each
    return max(1, min(count, most))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, which does not change; torch's function takes microseconds."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def as_rows(tensor: Tensor) -> Tensor:
    """View [..., D] as [rows, D]; copies where the strides allow no view."""
    return tensor.reshape(-1, tensor.shape[-1])


def empty_like(tensor: Tensor) -> Tensor:
    """Contiguous uninitialized tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_floats(op: str, **tensors: Tensor) -> None:
    """Raise an error for dtypes that the kernels cannot read.

    Raises:
        TypeError: a tensor has another dtype than :data:`FLOATS`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{op}.triton: {name} is {tensor.dtype}, but the kernel reads only bfloat16, float16 and float32; set "
                f"'kernels: {{{op}: reference}}' in the job"
            )
