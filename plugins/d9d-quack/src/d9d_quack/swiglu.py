"""Backend ``quack`` of the op ``swiglu``: the epilogue of a matrix product computes ``silu(gate) * up``.

The first product computes the gate and up projections together. It writes the gated activations, and both projections
for the backward. The backward's first product, the gradient of the gated activations, reads gate and up in its
epilogue, and writes both gradients and the gated activations again. So neither direction has an extra pass over memory.

Shapes: M rows, H features, I features inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``quack`` of the op ``swiglu``; imports the library, so that no step waits for the import."""
    with warnings.catch_warnings():  # deprecation warnings of the library's dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        import quack.gemm_interface  # noqa: F401
    return swiglu


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """SwiGLU layer by QuACK, see :func:`d9d_nn.ops.swiglu.swiglu`; the gate is computed from float32 sums.

    Args:
        x: [..., H], bfloat16 or float16.
        gate_weight: [I, H]; all weights in the dtype of ``x``.
        up_weight: [I, H].
        down_weight: [H, I].

    Returns:
        [..., H].

    Raises:
        TypeError: the dtype is not supported, or the dtypes differ.
    """
    tensors = (x, gate_weight, up_weight, down_weight)
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1 or x.dtype not in _FLOATS:
        names = ", ".join(sorted(str(dtype) for dtype in found))
        raise TypeError(f"swiglu.quack: x and its weights must all be bfloat16, or all float16, not {names}")
    rows = x.reshape(-1, x.shape[-1])
    if not rows.numel():  # nothing to launch, but the result must be connected to all inputs for autograd
        return (rows @ gate_weight.T * (rows @ up_weight.T) @ down_weight.T).view(x.shape)
    # The kernels' copies of tensors (TMA) need contiguous features.
    packed = (tensor.contiguous() for tensor in (rows, gate_weight, up_weight, down_weight))
    out: Tensor = _forward(*packed)[0]
    return out.view(x.shape)


@CustomOp.define("d9d_quack::swiglu")
def _forward(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Output [M, H] of the layer for rows [M, H]; and gate and up, for the backward: [M, 2 I], columns alternate."""
    # Imported here, because it takes seconds and the conditions of the backend do not need it.
    from quack.gemm_interface import gemm_gated

    weight = torch.cat([gate_weight, up_weight])
    both, gated = gemm_gated(rows, weight.T, activation="swiglu", concat_layout=("B",), tuned=False)
    return gated @ down_weight.T, both


@CustomOp.define("d9d_quack::swiglu_backward")
def _backward(
    grad: Tensor,
    rows: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    both: Tensor,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows [M, H], of the concatenated gate and up weights [2 I, H], and of the down weight [H, I].

    Gradients that are not needed are empty.

    ``needed``: for each of the forward's four arguments, whether its gradient is needed.
    """
    from quack.gemm_interface import gemm, gemm_dgated

    grads = [rows.new_empty(0) for _ in range(3)]
    # Dynamic scheduling does not change any tile, so results stay the same.
    differentiated, gated = gemm_dgated(
        grad, down_weight, both, activation="swiglu", dynamic_scheduler=True, tuned=False
    )
    if needed[0]:
        weight = torch.stack([gate_weight, up_weight], 1).view(-1, rows.shape[1])  # interleaved like the gradients
        grads[0] = differentiated @ weight
    if needed[1] or needed[2]:
        grads[1] = gemm(differentiated.T, rows, dynamic_scheduler=True, tuned=False, concat_layout=("out",))
    if needed[3]:
        grads[2] = grad.T @ gated
    return grads[0], grads[1], grads[2]


@_forward.register_fake
def _fake_forward(rows: Tensor, gate_weight: Tensor, _up_weight: Tensor, _down_weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], 2 * gate_weight.shape[0])


@_backward.register_fake
def _fake_backward(
    _grad: Tensor,
    rows: Tensor,
    gate_weight: Tensor,
    _up_weight: Tensor,
    down_weight: Tensor,
    _both: Tensor,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    features, hidden = gate_weight.shape
    shapes = (rows.shape, (2 * features, hidden), down_weight.shape)
    wanted = (needed[0], needed[1] or needed[2], needed[3])
    first, second, third = (rows.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))
    return first, second, third


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    needed = list(ctx.needs_input_grad)
    rows, both, down = _backward(grad.contiguous(), *ctx.saved_tensors, needed)
    half = both.shape[0] // 2
    grads = rows, both[:half], both[half:], down
    return tuple(each if need else None for each, need in zip(grads, needed, strict=True))


_forward.register_autograd(_differentiate, setup_context=_keep)
