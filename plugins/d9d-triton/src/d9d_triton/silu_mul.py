"""Backend of the op ``silu_mul``: one pass over memory forward, and one backward for both gradients.

Shapes: R rows (all leading dims), I features. Contiguous tensors are treated as one long row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.silu_mul import differentiate, gate_rows
from d9d_triton.launch import OPTIONS, as_rows, cdiv, check_floats, empty_like, next_power_of_2

#: Number of elements that one program computes.
_BLOCK = 2048


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``triton`` of the op ``silu_mul``; its function is the same for every signature."""
    return silu_mul


@CustomOp.define("d9d_triton::silu_mul")
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU-mul ``silu(gate) * up`` by Triton, see :func:`d9d_nn.ops.silu_mul.silu_mul`; rounded once.

    Args:
        gate: [..., I], of any strides.
        up: [..., I].

    Returns:
        [..., I], contiguous, in the promoted dtype of both.

    Raises:
        TypeError: the kernel does not support the dtype of gate or up.
        ValueError: the shapes of gate and up differ.
    """
    check_floats("silu_mul", gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"silu_mul.triton: gate {list(gate.shape)} and up {list(up.shape)} must have the same shape")
    out = _empty_out(gate, up)
    if out.numel():
        _launch(gate_rows, (out,), _rows(gate, up))
    return out


@CustomOp.define("d9d_triton::silu_mul_backward")
def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`silu_mul`.

    Args:
        grad: [..., I], gradient of the output; of any strides, expanded ones too.
        gate: [..., I].
        up: [..., I].

    Returns:
        The gradients of gate and up, in their dtypes.
    """
    grads = empty_like(gate), empty_like(up)
    if gate.numel():
        rows = _rows(grad, gate, up)
        _launch(differentiate, (*(x.view(rows[0].shape) for x in grads), gate), rows, GATED=False)
    return grads


@CustomOp.define("d9d_triton::silu_mul_backward_beside")
def silu_mul_backward_beside(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up in one tensor, so one matrix product can read both; recomputes the output, too.

    Args:
        grad: [R, I], gradient of the output; of any strides.
        gate: [R, I].
        up: [R, I], in the dtype of the gate.

    Returns:
        The gradients of gate and up [R, 2 I], and the output [R, I], in the dtype of the gate.
    """
    both, gated = _beside(gate)
    if gate.numel():
        _launch(differentiate, (*both.chunk(2, dim=1), gated), (grad, gate, up), GATED=True)
    return both, gated


def _beside(gate: Tensor) -> tuple[Tensor, Tensor]:
    rows, features = gate.shape
    return gate.new_empty(rows, 2 * features), gate.new_empty(rows, features)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one shape as rows [R, I]; if all are contiguous, as a single long row."""
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.view(1, -1) if contiguous else as_rows(tensor) for tensor in tensors]


def _launch(kernel: Any, outs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any) -> None:
    """Launch a kernel over non-empty inputs [R, I]; the first two outputs may have any row stride."""
    count, features = inputs[0].shape
    block = min(_BLOCK, next_power_of_2(features))
    strides = [out.stride(0) for out in outs[:-1]] + [stride for tensor in inputs for stride in tensor.stride()]
    kernel[(count * cdiv(features, block),)](*outs, *inputs, features, *strides, BLOCK=block, **options, **OPTIONS)


def _empty_out(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


@silu_mul.register_fake
def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return _empty_out(gate, up)


@silu_mul_backward.register_fake
def _fake_backward(_grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(gate), empty_like(up)


@silu_mul_backward_beside.register_fake
def _fake_beside(_grad: Tensor, gate: Tensor, _up: Tensor) -> tuple[Tensor, Tensor]:
    return _beside(gate)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = silu_mul_backward(grad, *ctx.saved_tensors)
    return grads


silu_mul.register_autograd(_backward, setup_context=_keep)
