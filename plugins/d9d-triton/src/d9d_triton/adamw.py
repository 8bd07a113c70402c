"""Backends of ``adamw`` and ``stochastic_adamw``: one launch updates all tensors of a group with equal dtypes.

A step reads each gradient once, and reads and writes weights and moments once. Gradient clipping, weight decay, the
gate and the rounding happen in the same pass, so these bytes divided by the memory bandwidth bound the time from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import triton.language as tl
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.adamw import count_step, update_weights
from d9d_triton.launch import OPTIONS, Blocks, cdiv, check_floats, on_device
from d9d_triton.support import interpreted

if TYPE_CHECKING:
    from d9d_optim.optimizer.base import Batch

#: Number of elements that one program updates. On an H200, 1,024 with 4 warps reach 4.1 TB/s; 4,096 with 8 warps reach
#: 3.7 (float32) or 2.8 (stochastic rounding).
_BLOCK = 1024
_WARPS = 4
#: Block size for Triton's interpreter, which takes milliseconds for each program, whatever it computes.
_BLOCK_INTERPRETED = 1 << 16
#: Number of step counts that one program increments.
_COUNTS = 128
#: Alignment of base addresses, in bytes, that wide loads need.
_ALIGNMENT = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def build(_signature: OpSignature) -> Callable[..., None]:
    """Build the backend of ``adamw``: AdamW with decoupled weight decay."""
    return FusedAdamW(stochastic=False)


def build_stochastic(_signature: OpSignature) -> Callable[..., None]:
    """Build the backend of ``stochastic_adamw``: AdamW that rounds bfloat16 weights and moments stochastically."""
    return FusedAdamW(stochastic=True)


class FusedAdamW:
    """AdamW step of a batch of tensors by Triton; caches tables that assign blocks of tensors to programs.

    Args:
        stochastic: whether to round bfloat16 weights and moments stochastically. The batch then has the slot
            ``generator``, and the noise of an element depends on its position in the whole tensor.
    """

    def __init__(self, *, stochastic: bool) -> None:
        self._stochastic = stochastic
        self._block = _BLOCK_INTERPRETED if interpreted() else _BLOCK
        self._blocks = Blocks(self._block)

    def __call__(
        self,
        batch: Batch,
        *,
        betas: tuple[float, float],
        eps: float,
        starts: Sequence[Tensor] | None = None,
    ) -> None:
        """Update parameters, moments, step counts and generators in place, if the gate is true.

        Args:
            batch: tensors of a group; dtypes may differ between parameters.
            betas: decay rates of the two running averages.
            eps: added to the root of the second moment.
            starts: for stochastic rounding: int32 [1] for each tensor, the index of its first element in the full
                tensor.

        Raises:
            TypeError: the kernel does not support the dtype of a parameter or a gradient.
        """
        columns = [batch.params, batch.grads, batch.slots["exp_avg"], batch.slots["exp_avg_sq"], batch.slots["step"]]
        lower = batch.slots.get("lower_bits")
        # Indices, in a row, of the tensors that have the parameter's shape.
        large = [*range(_LARGE), *([] if lower is None else [len(columns)])]
        columns += [] if lower is None else [lower]
        if self._stochastic:
            assert starts is not None
            columns += [batch.slots["generator"], list(starts)]
        alike: dict[tuple[bool, tuple[torch.dtype, ...]], list[list[Tensor]]] = {}
        scattered: list[tuple[Tensor, Tensor]] = []
        for row in zip(*columns, strict=True):
            tensors = list(row)
            for at in large:
                if not row[at].is_contiguous():
                    tensors[at] = row[at].contiguous()
                    if at != _GRADIENT:
                        scattered.append((row[at], tensors[at]))
            check_floats("stochastic_adamw" if self._stochastic else "adamw", parameter=tensors[0], gradient=tensors[1])
            aligned = all(tensors[at].data_ptr() % _ALIGNMENT == 0 for at in large)
            dtypes = tuple(tensor.dtype for tensor in tensors[:_LARGE])
            alike.setdefault((aligned, dtypes), []).append(tensors)
        for (aligned, _), rows in alike.items():
            with on_device(rows[0][0]):
                self._update(batch, rows, betas, eps, aligned=aligned, masters=lower is not None)
        for tensor, changed in scattered:
            tensor.copy_(changed)

    def _update(
        self,
        batch: Batch,
        rows: list[list[Tensor]],
        betas: tuple[float, float],
        eps: float,
        *,
        aligned: bool,
        masters: bool,
    ) -> None:
        """Update the tensors of a group that have equal dtypes and alignment, in one launch."""
        device = rows[0][0].device
        sizes = tuple(row[0].numel() for row in rows)
        # A new table in each step, because gradients get new addresses. It is in pinned memory, so that its copy to the
        # device does not block the host.
        table = torch.tensor(
            [*zip(*([tensor.data_ptr() for tensor in row] for row in rows), strict=True), sizes],
            dtype=torch.int64,
            pin_memory=device.type == "cuda",
        ).to(device, non_blocking=True)
        owners, firsts = self._blocks.of(sizes, device)
        factors = torch.empty(2, len(rows), dtype=torch.float32, device=device)
        keys = torch.empty(len(rows), dtype=torch.int64, device=device)
        count_step[(cdiv(len(rows), _COUNTS),)](
            table,
            factors,
            keys,
            batch.gate,
            len(rows),
            batch.lr,
            LOG2_BETA1=_log2(betas[0]),
            LOG2_BETA2=_log2(betas[1]),
            STOCHASTIC=self._stochastic,
            BLOCK=_COUNTS,
            **OPTIONS,
        )
        if not len(owners):
            return
        weight, gradient, average, _ = (_TYPES[tensor.dtype] for tensor in rows[0][:_LARGE])
        update_weights[(len(owners),)](
            table,
            owners,
            firsts,
            factors,
            keys,
            batch.gate,
            batch.gate if batch.divisor is None else batch.divisor,
            len(rows),
            1 - batch.lr * batch.weight_decay,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            WEIGHT=weight,
            GRADIENT=gradient,
            MOMENT=average,
            DIVIDES=batch.divisor is not None,
            STOCHASTIC=self._stochastic,
            MASTERS=masters,
            ALIGNED=aligned,
            BLOCK=self._block,
            num_warps=_WARPS,
            **OPTIONS,
        )


#: Number of parameter-sized tensors at the start of a row (parameter, gradient, two moments); index of the gradient.
_LARGE, _GRADIENT = 4, 1


def _log2(beta: float) -> float:
    # The kernel computes beta ** n as exp2(n * log2(beta)); with minus infinity for a beta of 0, the power is 0.
    return math.log2(beta) if beta else -math.inf
