"""Backend of the op ``swiglu``: gradients of gate and up side by side, one product for their input and one for weights.

Between products there are two passes over memory, one forward and one backward. The backward's writes the gradients of
gate and up where one product reads both, and once more what was gated, which nobody has to keep. So nothing adds up two
gradients of the input, and products are as large as those of one projection, though weights remain two parameters.

Shapes: R rows, H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.joint.products import joint_rows_gradient
from d9d_triton.silu_mul import silu_mul, silu_mul_backward_beside

#: A backend of the op.
Swiglu = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Products(Protocol):
    """Products of a linear layer and its gradients, of matrices of one dtype. A compiler may look into them or not."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """``rows @ weight.T``: [R, K] and [N, K] to [R, N]."""

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``grad @ weight``: [R, N] and [N, K] to [R, K]."""

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        """:meth:`rows_gradient` of several weights, one below the other."""

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """``grad.T @ rows``: [R, N] and [R, K] to [N, K]."""


class TorchProducts:
    """Joint SwiGLU's products as torch computes them."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Products`."""
        return rows.mm(weight.t())

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See :class:`Products`."""
        return grad.mm(weight)

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        """See :class:`Products`."""
        found: Tensor = joint_rows_gradient(grad, weights)
        return found

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """See :class:`Products`."""
        return grad.t().mm(rows)


def register(name: str, products: Products) -> Swiglu:
    """Register a joint SwiGLU: backend of the op over some products, as a custom op of torch.

    Args:
        name: name of the custom op, ``namespace::name``; each can be registered once.
        products: products of the layer.

    Returns:
        :func:`d9d_nn.ops.swiglu.swiglu` for tensors of one dtype, bfloat16, float16 or float32; it raises a
        ``TypeError`` for others.
    """

    @torch.library.custom_op(name, mutates_args=())
    def op(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer of rows [R, H]: [R, H], and gate and up [R, I] for the backward."""
        gate, up = products.forward(rows, gate_weight), products.forward(rows, up_weight)
        return products.forward(silu_mul(gate, up), down_weight), gate, up

    @op.register_fake
    def _(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        widths = (len(weight) for weight in (down_weight, gate_weight, up_weight))
        out, gate, up = (rows.new_empty(rows.shape[0], width) for width in widths)
        return out, gate, up

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])

    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(products, ctx.needs_input_grad, grad, *ctx.saved_tensors)

    op.register_autograd(backward, setup_context=keep)

    def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        found = {str(tensor.dtype) for tensor in (x, gate_weight, up_weight, down_weight)}
        if len(found) > 1:
            raise TypeError(f"swiglu: x and its weights must be of one dtype, not {', '.join(sorted(found))}")
        out: Tensor = op(x.reshape(-1, x.shape[-1]), gate_weight, up_weight, down_weight)[0]
        return out.view(x.shape)

    return swiglu


def _gradients(
    products: Products,
    needed: tuple[bool, ...],
    grad: Tensor,
    rows: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of rows and weights, from that of the layer's result [R, H]; those that are not needed are ``None``."""
    of_rows, of_gate, of_up, of_down = needed
    both, gated = silu_mul_backward_beside(products.rows_gradient(grad, down_weight), gate, up)
    down = products.weight_gradient(grad, gated) if of_down else None
    found = products.joint_rows_gradient(both, [gate_weight, up_weight]) if of_rows else None
    if of_gate and of_up:
        return found, *torch.chunk(products.weight_gradient(both, rows), 2), down
    parts = zip(torch.chunk(both, 2, dim=1), (of_gate, of_up), strict=True)
    return found, *(products.weight_gradient(part, rows) if wanted else None for part, wanted in parts), down


#: Backend over torch's products.
swiglu = register("d9d_triton::swiglu", TorchProducts())


def build(_signature: OpSignature) -> Swiglu:
    """Backend function; it is the same for all signatures."""
    return swiglu
