"""Backend ``liger`` of the op ``silu_mul``.

The library's backward overwrites its inputs with gradients, so this backend passes copies of them.

Shapes: I features of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from liger_kernel.ops import swiglu_backward, swiglu_forward
from torch import Tensor


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``liger`` of the op ``silu_mul``; its function is the same for every signature."""
    return silu_mul


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU-mul ``silu(gate) * up``, see :func:`d9d_nn.ops.silu_mul.silu_mul`; rounds SiLU to the arguments' dtype.

    Args:
        gate: [..., I].
        up: [..., I].

    Returns:
        [..., I], contiguous, in the promoted dtype of both.

    Raises:
        ValueError: gate and up differ in shape.
    """
    if gate.shape != up.shape:
        raise ValueError(f"silu_mul.liger: gate {list(gate.shape)} and up {list(up.shape)} must have the same shape")
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out: Tensor = forward(gate.to(dtype), up.to(dtype))
    return out


@CustomOp.define("d9d_liger::silu_mul")
def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Custom op that computes :func:`silu_mul`, for two tensors of one shape and dtype."""
    if not gate.numel():
        return _contiguous_like(gate)
    out: Tensor = swiglu_forward(gate.contiguous(), up.contiguous())[2]
    return out


@CustomOp.define("d9d_liger::silu_mul_backward")
def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous, from the gradient of the output, which may have any strides."""
    grads = gate.clone(memory_format=torch.contiguous_format), up.clone(memory_format=torch.contiguous_format)
    if gate.numel():
        swiglu_backward(*grads, grad.contiguous())
    return grads


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@forward.register_fake
def _fake(gate: Tensor, _up: Tensor) -> Tensor:
    return _contiguous_like(gate)


@backward.register_fake
def _fake_backward(_grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous_like(gate), _contiguous_like(up)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = backward(grad, *ctx.saved_tensors)
    return tuple(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=True))


forward.register_autograd(_backward, setup_context=_keep)
