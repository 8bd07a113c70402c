"""Backend of the op ``gradient_power``: the squares of all gradients, read once in one launch for each number format.

Each program sums a block in float32; their sums are added in float64, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton.language as tl
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.gradient_power import add_squares
from d9d_triton.launch import OPTIONS, Blocks, check_floats, on_device
from d9d_triton.support import interpreted

#: Elements that a program loads together, and how often.
_BLOCK, _PARTS = 4096, 4
#: Interpreted programs take milliseconds each, whatever they compute.
_BLOCK_INTERPRETED = 1 << 14
#: Bytes that an address must be a multiple of for wide loads.
_ALIGNMENT = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def build(_signature: OpSignature) -> Callable[[Sequence[Tensor], torch.device], Tensor]:
    """Sum of squares of the gradients."""
    return SumOfSquares()


class SumOfSquares:
    """Gradient power by Triton: sum of squares of tensors; it keeps tables of where blocks of work begin."""

    def __init__(self) -> None:
        self._block = _BLOCK_INTERPRETED if interpreted() else _BLOCK
        self._blocks = Blocks(self._block * _PARTS)

    def __call__(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """Add up the squares of all elements.

        Args:
            gradients: at least one, of any number formats; those of another device than the result's are waited for.
            device: of the result.

        Returns:
            float64, 0-d.

        Raises:
            TypeError: a gradient is of a dtype that the kernel does not read.
        """
        alike: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            check_floats("gradient_power", gradient=gradient)
            here = gradient.to(device).contiguous()
            alike.setdefault((here.data_ptr() % _ALIGNMENT == 0, here.dtype), []).append(here)
        parts = [self._sums(tensors, aligned=aligned) for (aligned, _), tensors in alike.items()]
        return torch.cat(parts).sum(dtype=torch.float64)

    def _sums(self, tensors: list[Tensor], *, aligned: bool) -> Tensor:
        """Sums of the programs, float32, for tensors of one number format."""
        device, sizes = tensors[0].device, tuple(tensor.numel() for tensor in tensors)
        # Gradients have other addresses in each step. The copy waits for nothing, as it is from pinned memory.
        table = torch.tensor(
            [[tensor.data_ptr() for tensor in tensors], sizes], dtype=torch.int64, pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)
        owners, firsts = self._blocks.of(sizes, device)
        sums = torch.empty(len(owners), dtype=torch.float32, device=device)
        with on_device(tensors[0]):
            add_squares[(len(owners),)](
                table, owners, firsts, sums, len(tensors), DTYPE=_TYPES[tensors[0].dtype], ALIGNED=aligned,
                PARTS=_PARTS, BLOCK=self._block, num_warps=4, **OPTIONS,
            )  # fmt: skip
        return sums
