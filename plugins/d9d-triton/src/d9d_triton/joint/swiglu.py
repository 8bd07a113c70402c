"""Backend of the op ``swiglu``: one product for the gradient of the input, one for the gate and up weight gradients.

Between its matrix products, the backend makes one elementwise pass over memory in the forward and one in the backward.
The backward's pass writes the gradients of gate and up into one tensor and recomputes the gated activations, so that
these are not kept. One product with the concatenated weights then gives the gradient of the input, without a pass that
adds two gradients, although the weights remain two parameters.

Shapes: R rows, H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.joint.products import joint_rows_gradient
from d9d_triton.silu_mul import silu_mul, silu_mul_backward_beside

#: Type of a backend of the op: function of x, gate weight, up weight and down weight.
Swiglu = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Products(Protocol):
    """Matrix products of a linear layer and its gradients; all matrices have one dtype."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """``rows @ weight.T``: [R, K] and [N, K] to [R, N]."""

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``grad @ weight``: [R, N] and [N, K] to [R, K]."""

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        """:meth:`rows_gradient` of one weight [N, K], the concatenation of ``weights`` along dimension 0."""

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """``grad.T @ rows``: [R, N] and [R, K] to [N, K]."""


class TorchProducts:
    """Products of the joint SwiGLU computed by torch."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Compute ``rows @ weight.T``, see :class:`Products`."""
        return rows.mm(weight.t())

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute ``grad @ weight``, see :class:`Products`."""
        return grad.mm(weight)

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        """Compute the gradient of rows of several weights, see :class:`Products`."""
        found: Tensor = joint_rows_gradient(grad, weights)
        return found

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Compute ``grad.T @ rows``, see :class:`Products`."""
        return grad.t().mm(rows)


def register(name: str, products: Products) -> Swiglu:
    """Register a joint SwiGLU backend over the given products, as a custom op of torch.

    Args:
        name: name of the custom op, ``namespace::name``; each can be registered once.
        products: matrix products of the layer.

    Returns:
        A function like :func:`d9d_nn.ops.swiglu.swiglu`, for tensors of one dtype: bfloat16, float16 or float32. It
        raises a ``TypeError`` for other or different dtypes.
    """

    @CustomOp.define(name)
    def op(rows: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output of the layer [R, H] for rows [R, H]; gate and up [R, I] for the backward."""
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
            raise TypeError(f"swiglu: x and the weights must be of one dtype, not {', '.join(sorted(found))}")
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
    """Gradients of rows and weights from the gradient of the output [R, H]; ``None`` where a gradient is not needed."""
    of_rows, of_gate, of_up, of_down = needed
    both, gated = silu_mul_backward_beside(products.rows_gradient(grad, down_weight), gate, up)
    down = products.weight_gradient(grad, gated) if of_down else None
    found = products.joint_rows_gradient(both, [gate_weight, up_weight]) if of_rows else None
    if of_gate and of_up:
        return found, *torch.chunk(products.weight_gradient(both, rows), 2), down
    parts = zip(torch.chunk(both, 2, dim=1), (of_gate, of_up), strict=True)
    return found, *(products.weight_gradient(part, rows) if wanted else None for part, wanted in parts), down


#: Backend that uses torch's products.
swiglu = register("d9d_triton::swiglu", TorchProducts())


def build(_signature: OpSignature) -> Swiglu:
    """Build the backend ``triton`` of the op ``swiglu``; its function is the same for every signature."""
    return swiglu
