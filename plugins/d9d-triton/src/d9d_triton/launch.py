"""Helpers of launches: shapes and strides as kernels take them, the device, and the number of programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from d9d_triton import support

#: Dtypes of what the kernels read; they compute in float32.
FLOATS = tuple(getattr(torch, name) for name in support.FLOATS)
#: Options of the compiler. Triton's default for the fusion of multiplications and additions depends on its version.
OPTIONS = {"enable_fp_fusion": True}
#: Threads of a warp.
WARP = 32
#: Programs for each multiprocessor where a kernel loops over its work: enough to hide the latency of loads.
_PROGRAMS_EACH = 4
#: Multiprocessors where there is no GPU: kernels are interpreted, one program after the other.
_MULTIPROCESSORS_INTERPRETED = 2
#: Tables of blocks that are kept. In most jobs, groups have the same gradients in each step.
_TABLES = 32


class Blocks:
    """Blocks of one Triton launch over many tensors: tables of them; the last ones are kept.

    Args:
        size: elements of a block, the work of one program.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Tensor that each program works on, and the first program of each tensor; both int32.

        Args:
            sizes: numbers of elements of the tensors.
            device: of the tables; always the same.
        """
        if sizes not in self._tables:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            self._tables[sizes] = self._divide(sizes, device)
        return self._tables[sizes]

    def _divide(self, sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([triton.cdiv(size, self._size) for size in sizes])
        owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
        firsts = (counts.cumsum(0) - counts).to(torch.int32)
        if device.type == "cuda":
            owners, firsts = owners.pin_memory(), firsts.pin_memory()
        return owners.to(device, non_blocking=True), firsts.to(device, non_blocking=True)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which launches go to the GPU of the tensor; Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def persistent_programs(tensor: Tensor, most: int, each: int = _PROGRAMS_EACH) -> int:
    """Number of programs that share work on the tensor's device by looping over it: the same for equal inputs.

    Args:
        tensor: on the device.
        most: pieces of work.
        each: programs for each multiprocessor.
    """
    count = _MULTIPROCESSORS_INTERPRETED
    if tensor.is_cuda:
        count = torch.cuda.get_device_properties(tensor.device).multi_processor_count * each
    return max(1, min(count, most))


def as_rows(tensor: Tensor) -> Tensor:
    """View [..., D] as [rows, D]; a copy where strides allow no view."""
    return tensor.reshape(-1, tensor.shape[-1])


def empty_like(tensor: Tensor) -> Tensor:
    """Contiguous memory of the shape and dtype of a tensor, whatever its strides."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_floats(op: str, **tensors: Tensor) -> None:
    """Refuse dtypes that the kernels would read as something else.

    Raises:
        TypeError: a tensor has another dtype than :data:`FLOATS`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{op}.triton: {name} is {tensor.dtype}, the kernel computes in float32 and reads bfloat16, float16 "
                f"and float32; say 'kernels: {{{op}: reference}}' in the job"
            )
