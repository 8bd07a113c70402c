"""Backend of the op ``add_rms_norm``: one pass over memory forward, and one backward for all gradients.

The sum has two gradients: one through the norm and one through the residual stream. The backward kernel adds them while
the gradient through the norm is in registers, so that it reads three tensors and writes one.

Shapes: ``...`` any leading dims, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.launch import check_floats
from d9d_triton.rms_norm import fill_norm, rms_norm_backward


def build(_signature: OpSignature) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the backend ``triton`` of the op ``add_rms_norm``; its function is the same for every signature."""
    return add_rms_norm


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Addition and RMSNorm by Triton, see :func:`d9d_nn.ops.add_rms_norm.add_rms_norm`; the norm is of the rounded sum.

    Args:
        x: [..., D], of any strides.
        added: [..., D], of any strides; ``None`` to add nothing.
        weight: [D].
        eps: added to the mean square.
        dtype: dtype of the norm, bfloat16, float16 or float32; by default the dtype of the sum.

    Returns:
        The norm and the sum, [..., D], contiguous; the sum in the promoted dtype of ``x`` and ``added``. Without
        ``added`` the sum shares the memory of ``x``.

    Raises:
        TypeError: the kernel does not support the dtype of a tensor.
        ValueError: the shapes do not match.
    """
    found: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, added, weight, eps, dtype)
    return found


@CustomOp.define("d9d_triton::add_rms_norm")
def add_and_normalise(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Custom op behind :func:`add_rms_norm`, without autograd.

    Without ``added`` the second output is an empty tensor: a custom op may not return one of its inputs.
    """
    _check(x, added, weight)
    out, total = _outputs(x, added, dtype)
    fill_norm(out, x, weight, eps, added, total)
    return out, total


class _AddRmsNorm(torch.autograd.Function):
    """Autograd function that receives the gradients of norm and sum together, even where the sum is ``x`` itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # materialized zeros would be as large as the residual stream
        normed, total = add_and_normalise(x, added, weight, eps, dtype)
        total = x if added is None else total
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if added is None else added.dtype)
        return normed, total

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        total, weight = ctx.saved_tensors
        of_x, of_added, of_weight, *_ = ctx.needs_input_grad
        # ``added`` may have a narrower dtype than the residual stream, such as the output of a product under autocast.
        narrow = ctx.dtypes[1] if of_added and ctx.dtypes[1] != total.dtype else None
        of_total, of_narrow, grad_weight = residual, residual, None
        if grad is not None:
            of_total, grad_weight, twice = rms_norm_backward(
                grad, total, weight, ctx.eps, of_x or of_added, of_weight, residual, narrow
            )
            of_narrow = of_total if narrow is None else twice
        grad_x, grad_added = (
            found.to(dtype) if needed and found is not None else None
            for found, dtype, needed in zip((of_total, of_narrow), ctx.dtypes, (of_x, of_added), strict=True)
        )
        return grad_x, grad_added, grad_weight if of_weight else None, None, None


def _outputs(x: Tensor, added: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Uninitialized outputs: the norm, and the sum (empty without ``added``)."""
    wide = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
    return x.new_empty(x.shape, dtype=dtype or wide), x.new_empty(0 if added is None else x.shape, dtype=wide)


def _check(x: Tensor, added: Tensor | None, weight: Tensor) -> None:
    """Raise an error for dtypes that the kernel would misread, and shapes for which it would read out of bounds."""
    check_floats("add_rms_norm", x=x, weight=weight, **({} if added is None else {"added": added}))
    if weight.shape != x.shape[-1:] or (added is not None and added.shape != x.shape):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, added, weight) if tensor is not None)
        raise ValueError(
            f"add_rms_norm.triton: x, added and weight are {shapes}; they must have the shapes [..., D], [..., D] "
            "and [D]"
        )


@add_and_normalise.register_fake
def _fake(
    x: Tensor, added: Tensor | None, _weight: Tensor, _eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return _outputs(x, added, dtype)
