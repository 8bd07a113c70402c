"""Backend of the op ``gradient_power``: sum of squares of all gradients, one launch per dtype and alignment.

Each program sums one block in float32; the sums of the programs are added in float64, in a fixed order.
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

#: Number of elements that a program loads at once, and number of its loads.
_BLOCK, _PARTS = 4096, 4
#: Block size for Triton's interpreter, which takes milliseconds for each program, whatever it computes.
_BLOCK_INTERPRETED = 1 << 14
#: Alignment of addresses, in bytes, that wide loads need.
_ALIGNMENT = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def build(_signature: OpSignature) -> Callable[[Sequence[Tensor], torch.device], Tensor]:
    """Build the backend of ``gradient_power``: the sum of squares of all gradients."""
    return SumOfSquares()


class SumOfSquares:
    """Sum of squares of tensors by Triton; caches tables that assign blocks of tensors to programs."""

    def __init__(self) -> None:
        self._block = _BLOCK_INTERPRETED if interpreted() else _BLOCK
        self._blocks = Blocks(self._block * _PARTS)

    def __call__(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """Add up the squares of all elements.

        Args:
            gradients: at least one tensor, of any supported dtypes; gradients on another device are copied to
                ``device``.
            device: device of the result.

        Returns:
            float64, 0-d.

        Raises:
            TypeError: the kernel does not support the dtype of a gradient.
        """
        alike: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            check_floats("gradient_power", gradient=gradient)
            here = gradient.to(device).contiguous()
            alike.setdefault((here.data_ptr() % _ALIGNMENT == 0, here.dtype), []).append(here)
        parts = [self._sums(tensors, aligned=aligned) for (aligned, _), tensors in alike.items()]
        return torch.cat(parts).sum(dtype=torch.float64)

    def _sums(self, tensors: list[Tensor], *, aligned: bool) -> Tensor:
        """Sums of squares, float32, one per program, for tensors of equal dtype and alignment."""
        device, sizes = tensors[0].device, tuple(tensor.numel() for tensor in tensors)
        # A new table in each call, because gradients get new addresses. It is in pinned memory, so that its copy to the
        # device does not block the host.
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
