"""Backends ``fp8`` and ``fp8_emulated`` of ``grouped_linear``: products of experts in float8, with one scale per row.

Weight gradients stay in bfloat16: their products sum over an expert's rows, whose number would have to be a multiple of
16 in float8. Shapes: R rows, E experts, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.deferral import Deferral
from d9d_core.kernel import Decision, OpSignature
from d9d_nn.ops.deferred import Product, may_defer, product
from d9d_nn.ops.grouped_linear import autocast_operands, boundaries, clear, grouped_linear, packed
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import ScalingType

from d9d_fp8.products import as_dtype
from d9d_fp8.quantization import Granularity, Operand, dequantize, quantize

_ROW = Operand(Granularity.ROW, power_of_two=True)
_ALIGNMENT = 16
#: Major compute capabilities that torch's kernel supports.
_CAPABILITIES = (9, 10)
_EMULATED = ("float32", "bfloat16", "float16")


def supports_grouped(signature: OpSignature) -> Decision:
    """Accept bfloat16 on CUDA with compute capability 9 or 10; priority 0, so a job must name the backend."""
    if refusal := _misaligned(signature):
        return Decision(accept=False, reason=refusal)
    if signature.device != "cuda":
        reason = f"float8 kernels need CUDA, the device is {signature.device}; fp8_emulated runs on any device"
        return Decision(accept=False, reason=reason)
    if signature.dtype != "bfloat16":
        return Decision(accept=False, reason=f"the kernel needs models in bfloat16, this one is {signature.dtype}")
    # Without a GPU, as on a laptop that checks a cluster's job, assume a suitable one.
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _CAPABILITIES:
        shown = "{}.{}".format(*torch.cuda.get_device_capability())
        return Decision(accept=False, reason=f"the kernel needs compute capability 9.x or 10.x, this GPU has {shown}")
    reason = "float8 products, weight gradients in bfloat16; used only if the job names it, because it rounds"
    return Decision(accept=True, reason=reason)


def build_grouped(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``fp8`` of the op ``grouped_linear``."""
    return grouped


def supports_emulated(signature: OpSignature) -> Decision:
    """Accept floats on any device, if both feature sizes suit fp8; priority 0, so a job must name the backend."""
    if refusal := _misaligned(signature):
        return Decision(accept=False, reason=refusal)
    if signature.dtype not in _EMULATED:
        return Decision(accept=False, reason=f"needs one of {', '.join(_EMULATED)}, the model is {signature.dtype}")
    reason = "rounds as fp8 does, in a loop over experts; used only if the job names it, because it is slow"
    return Decision(accept=True, reason=reason)


def build_emulated(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``fp8_emulated`` of the op ``grouped_linear``."""
    return partial(grouped, emulate=True)


def grouped(
    x: Tensor,
    bank: Tensor,
    counts: Tensor,
    *,
    spare_rows: bool = True,
    deferral: Deferral | None = None,
    emulate: bool = False,
) -> Tensor:
    """Grouped linear map in float8, see :func:`d9d_nn.ops.grouped_linear.grouped_linear`.

    The host waits for the counts of rows only with ``emulate``, which multiplies in float32 in a loop over experts.
    """
    x, bank = autocast_operands(x, bank)
    ends, spare = boundaries(x, counts, spare_rows=spare_rows)
    x = packed(x)
    if may_defer(bank, deferral):
        assert deferral is not None
        return product(x, bank, deferral, _by_expert(ends, spare, emulate))
    out: Tensor = _Grouped.apply(x, bank, ends, spare, emulate)
    return out


def _by_expert(ends: Tensor, spare: Tensor | None, emulate: bool) -> Product:
    return Product(
        forward=lambda x, bank: _multiply(x, bank.mT, ends, spare, emulate),
        rows_gradient=lambda grad, bank: _multiply(packed(grad), bank, ends, spare, emulate),
        weight_gradient=lambda x, grad: _bank_gradient(x, packed(grad), ends, emulate),
    )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bank: Tensor, ends: Tensor, spare: Tensor | None, emulate: bool) -> Tensor:
        ctx.save_for_backward(x, bank, ends, spare)
        ctx.emulate = emulate
        return _multiply(x, bank.mT, ends, spare, emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, bank, ends, spare = ctx.saved_tensors
        grad = packed(grad)
        grad_x = grad_bank = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(grad, bank, ends, spare, ctx.emulate)
        if ctx.needs_input_grad[1]:
            grad_bank = _bank_gradient(x, grad, ends, ctx.emulate)
        return grad_x, grad_bank, None, None, None


def _multiply(rows: Tensor, bank: Tensor, ends: Tensor, spare: Tensor | None, emulate: bool) -> Tensor:
    """Multiply the rows of each expert e, among rows [R, K], by ``bank[e].T``, where bank is [E, N, K]; return [R, N].

    Spare rows, which come after the last expert's, are not multiplied; they are zero in the result.
    """
    a, b = quantize(rows, _ROW), quantize(bank, _ROW)
    if emulate:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        out = grouped_linear(dequantize(a), dequantize(b).mT, counts, spare_rows=spare is not None)
        return as_dtype(out, rows.dtype)
    return clear(_scaled_grouped_mm(a.data, a.scale, b.data, b.scale, ends), spare)


def _bank_gradient(x: Tensor, grad: Tensor, ends: Tensor, emulate: bool) -> Tensor:
    if not emulate:
        return functional.grouped_mm(x.mT, grad, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    pairs = zip(torch.split(x[: sum(sizes)], sizes), torch.split(grad[: sum(sizes)], sizes), strict=True)
    return torch.stack([rows.mT @ part for rows, part in pairs])


# A custom op, because torch 2.11 cannot compile torch's own ``scaled_grouped_mm``.
@CustomOp.define("d9d_fp8::scaled_grouped_mm")
def _scaled_grouped_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor) -> Tensor:
    if not len(a):
        return a.new_empty(0, b.shape[1], dtype=torch.bfloat16)
    multiply = functional.scaled_grouped_mm  # type: ignore[attr-defined] # public, but not in torch's stubs
    out: Tensor = multiply(
        a,
        b.mT,
        a_scale.squeeze(-1),
        ScalingType.RowWise,
        b_scale.squeeze(-1),
        ScalingType.RowWise,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,  # as in torchao
    )
    return out


@_scaled_grouped_mm.register_fake
def _(a: Tensor, _a_scale: Tensor, b: Tensor, _b_scale: Tensor, _ends: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1], dtype=torch.bfloat16)


def _misaligned(signature: OpSignature) -> str | None:
    for name in ("in_features", "out_features"):
        if signature.static[name] % _ALIGNMENT:
            return f"needs features in multiples of {_ALIGNMENT}: {name} is {signature.static[name]}"
    return None
