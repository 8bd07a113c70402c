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

#: Multiple of features that the library needs: its CUTLASS kernels load eight bfloat16 elements at once.
_ALIGNMENT = 8


def supports(signature: OpSignature) -> Decision:
    """Accept bfloat16 on CUDA; priority 0, so a job must name the backend."""
    if refusal := _refusal(signature):
        return Decision(accept=False, reason=refusal)
    reason = (
        "one call for all experts, but the host waits for the counts of rows before each product; used only if the job "
        "names it"
    )
    return Decision(accept=True, reason=reason)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``grouped_gemm`` of the op ``grouped_linear``; its function is the same for every signature."""
    return GroupedGemm(importlib.import_module("grouped_gemm.ops").gmm)


class GroupedGemm:
    """Grouped linear map by grouped_gemm, see :func:`d9d_nn.ops.grouped_linear.grouped_linear`.

    The host waits for the counts of rows before each product.

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
            ValueError: the counts add up to more than the number of rows, or, without spare rows, to less.
        """
        x, bank = autocast_operands(x, bank)
        sizes = counts.to("cpu", torch.int64)
        used = int(sizes.sum())
        spare = len(x) - used
        if spare < 0 or (spare and not spare_rows):
            raise ValueError(
                f"grouped_gemm: counts add up to {used}, but there are {len(x)} rows; "
                "sort rows by expert and count each once, or pass spare_rows=True if the last rows are padding"
            )
        if not bool(sizes.all()):
            bank = _clear_idle(bank, counts == 0)
        # The library fails if there is no row; torch's product of no rows gives the weights zero gradients.
        out = self._gmm(x[:used].contiguous(), bank.contiguous(), sizes, False) if used else x[:0] @ bank[0]
        return torch.cat([out, out.new_zeros(spare, bank.shape[2])]) if spare else out


def _clear_idle(bank: Tensor, idle: Tensor) -> Tensor:
    """Return the stacked expert weights; the backward zeros the gradients of experts e where ``idle[e]`` is true."""
    cleared: Tensor = _ClearIdle.apply(bank, idle)
    return cleared


class _ClearIdle(torch.autograd.Function):
    """Autograd function that zeros weight gradients of idle experts, which the library may leave uninitialised."""

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
        return f"grouped_gemm needs CUDA, the device is {signature.device}"
    if signature.dtype != "bfloat16":
        return f"grouped_gemm needs bfloat16, the model is {signature.dtype}"
    for name in ("in_features", "out_features"):
        if signature.static[name] % _ALIGNMENT:
            return f"needs features in multiples of {_ALIGNMENT}: {name} is {signature.static[name]}"
    return None
