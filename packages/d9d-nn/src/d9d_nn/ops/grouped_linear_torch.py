"""Backend ``grouped_mm`` of ``grouped_linear``: ``torch.nn.functional.grouped_mm``.

Shapes: R rows, E experts, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from d9d_nn.ops.deferred import Product, may_defer, product
from d9d_nn.ops.grouped_linear import autocast_operands, boundaries, clear, packed

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: The number of bytes of an input row, and of an output row, must be a multiple of this.
_ALIGNMENT = 16
#: Major compute capabilities of torch's kernel. On other GPUs torch loops over experts and waits for their offsets.
_CAPABILITIES = (9, 10)


def supports(signature: OpSignature) -> Decision:
    """Accept signatures that torch can compute; on CUDA, only if torch's kernel does not make the host wait."""
    if refusal := _refusal(signature):
        return Decision(accept=False, reason=refusal)
    how = "one kernel, counts stay on the device" if signature.device == "cuda" else "torch's loop over experts"
    return Decision(accept=True, reason=how, priority=10)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Return the backend function :func:`grouped_mm`, the same for all signatures."""
    return grouped_mm


def grouped_mm(
    x: Tensor, bank: Tensor, counts: Tensor, *, spare_rows: bool = True, deferral: Deferral | None = None
) -> Tensor:
    """Grouped linear map, see :func:`d9d_nn.ops.grouped_linear.grouped_linear`; counts stay on the device."""
    x, bank = autocast_operands(x, bank)
    ends, spare = boundaries(x, counts, spare_rows=spare_rows)
    if may_defer(bank, deferral):
        assert deferral is not None
        return product(packed(x), bank.contiguous(), deferral, _by_expert(ends, spare))
    out: Tensor = _GroupedMM.apply(packed(x), bank.contiguous(), ends, spare)
    return out


def _by_expert(ends: Tensor, spare: Tensor | None) -> Product:
    return Product(
        forward=lambda x, bank: clear(functional.grouped_mm(x, bank, offs=ends), spare),
        rows_gradient=lambda grad, bank: _rows_gradient(packed(grad), bank, ends, spare),
        weight_gradient=lambda x, grad: _bank_gradient(x, packed(grad), ends),
    )


class _GroupedMM(torch.autograd.Function):
    """Grouped product whose backward, unlike torch's, accepts any stride and gives zeros in spare rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bank: Tensor, ends: Tensor, spare: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bank, ends, spare)
        return clear(functional.grouped_mm(x, bank, offs=ends), spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, bank, ends, spare = ctx.saved_tensors
        grad = packed(grad)
        grad_x = grad_bank = None
        if ctx.needs_input_grad[0]:
            grad_x = _rows_gradient(grad, bank, ends, spare)
        if ctx.needs_input_grad[1]:
            grad_bank = _bank_gradient(x, grad, ends)
        return grad_x, grad_bank, None, None


def _rows_gradient(grad: Tensor, bank: Tensor, ends: Tensor, spare: Tensor | None) -> Tensor:
    return clear(functional.grouped_mm(grad, bank.mT, offs=ends), spare)


def _bank_gradient(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(x.mT, grad, offs=ends)


def _refusal(signature: OpSignature) -> str | None:
    device, dtype = signature.device, signature.dtype
    if device not in ("cpu", "cuda"):
        return f"torch computes grouped products on cpu and cuda, the device is {device}"
    if dtype not in _BYTES:
        return f"needs one of {', '.join(_BYTES)}, the model is {dtype}"
    for name in ("in_features", "out_features"):
        features = signature.static[name]
        if features * _BYTES[dtype] % _ALIGNMENT:
            multiple = _ALIGNMENT // _BYTES[dtype]
            return (
                f"needs rows in multiples of {_ALIGNMENT} bytes: {name} is {features}, "
                f"not a multiple of {multiple} for {dtype}"
            )
    if device == "cuda" and dtype != "bfloat16":
        return f"torch's kernel is for bfloat16; for {dtype} it would loop over experts and wait for the device"
    # A laptop that checks a job for a cluster has no GPU, and assumes a suitable one.
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _CAPABILITIES:
        major, minor = torch.cuda.get_device_capability()
        return (
            f"torch's kernel is for compute capability {' or '.join(f'{c}.x' for c in _CAPABILITIES)}, this GPU has "
            f"{major}.{minor}; here it would loop over experts and wait for the device"
        )
    return None
