"""Backend ``grouped_gemm`` of ``grouped_linear``: ``grouped_gemm.ops.gmm``.

Shapes: R rows, E experts, I features in, O features out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import Decision, OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from torch import Tensor

#: The library's CUTLASS kernels load eight bfloat16 numbers at once.
_ALIGNMENT = 8


def supports(signature: OpSignature) -> Decision:
    """Accept bfloat16 on CUDA, with priority 0: the job has to ask for it by name."""
    if refusal := _refusal(signature):
        return Decision(accept=False, reason=refusal)
    reason = "one call for all experts; only by name, as the host waits for the counts of rows before each product"
    return Decision(accept=True, reason=reason)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Backend function; it is the same for all signatures."""
    return GroupedGemm(importlib.import_module("grouped_gemm.ops").gmm)


class GroupedGemm:
    """Grouped linear map by grouped_gemm, see :func:`d9d_nn.ops.grouped_linear.grouped_linear`; host waits for counts.

    Args:
        gmm: the library's ``(a [R, I], b [E, I, O], batch_sizes int64 [E] on the CPU, trans_b) -> [R, O]``, with a
            gradient.
    """

    def __init__(self, gmm: Callable[..., Tensor]) -> None:
        self._gmm = gmm

    def __call__(
        self,
        x: Tensor,
        bank: Tensor,
        counts: Tensor,
        *,
        spare_rows: bool = True,
        deferral: Deferral | None = None,  # noqa: ARG002 - the library computes both gradients at once
    ) -> Tensor:
        """Multiply each row by its expert's matrix.

        Raises:
            ValueError: counts add up to more than there are rows, or to less without spare rows.
        """
        x, bank = autocast_operands(x, bank)
        sizes = counts.to("cpu", torch.int64)
        used = int(sizes.sum())
        spare = len(x) - used
        if spare < 0 or (spare and not spare_rows):
            raise ValueError(
                f"grouped_gemm: counts add up to {used}, but there are {len(x)} rows; "
                "sort rows by expert and count each once, or pass spare_rows=True if some at the end belong to nobody"
            )
        if not bool(sizes.all()):
            bank = _clear_idle(bank, counts == 0)
        # Without any row the library fails; this has no rows either, and gradients of zeros.
        out = self._gmm(x[:used].contiguous(), bank.contiguous(), sizes, False) if used else x[:0] @ bank[0]
        return torch.cat([out, out.new_zeros(spare, bank.shape[2])]) if spare else out


def _clear_idle(bank: Tensor, idle: Tensor) -> Tensor:
    """Identity on the bank, whose backward zeros the gradient of experts where ``idle`` bool [E] is true."""
    cleared: Tensor = _ClearIdle.apply(bank, idle)
    return cleared


class _ClearIdle(torch.autograd.Function):
    """Autograd function that zeros weight gradients of idle experts; no document promises that the library does."""

    @staticmethod
    def forward(ctx: Any, bank: Tensor, idle: Tensor) -> Tensor:
        ctx.save_for_backward(idle)
        return bank.view_as(bank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (idle,) = ctx.saved_tensors
        return grad.masked_fill(idle.view(-1, 1, 1), 0), None


def _refusal(signature: OpSignature) -> str | None:
    if signature.device != "cuda":
        return f"grouped_gemm is for CUDA, the device is {signature.device}"
    if signature.dtype != "bfloat16":
        return f"grouped_gemm is for bfloat16, the model is {signature.dtype}"
    for name in ("in_features", "out_features"):
        if signature.static[name] % _ALIGNMENT:
            return f"needs features in multiples of {_ALIGNMENT}: {name} is {signature.static[name]}"
    return None
