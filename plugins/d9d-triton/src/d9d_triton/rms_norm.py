"""Backend of the op ``rms_norm``: one pass over memory forward, and one backward for both gradients.

Only the inputs are kept for the backward, which has whole rows in registers and recomputes their root mean squares.
Each program sums the weight gradient over its rows; the sums of the programs are then added in a fixed order.

Shapes: R rows (all leading dims), D features, P programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.column_sums import column_sums
from d9d_triton.kernels.rms_norm import differentiate, normalise
from d9d_triton.launch import OPTIONS, as_rows, cdiv, check_floats, empty_like, next_power_of_2, persistent_programs

#: Number of elements of a tile; a tile holds several rows if they are shorter, or one row that is longer.
_TILE = 2048
#: Largest number of features for which the backward loads the next tile ahead, with 16-bit dtypes only: two tiles of
#: longer or wider rows do not fit into registers. For 16,384 rows of 2,048 features on an H200, float32 takes 129 us
#: with loading ahead and 115 without, bfloat16 66 and 68.
_MOST_FEATURES_AHEAD = 8192


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``triton`` of the op ``rms_norm``; its function is the same for every signature."""
    return rms_norm


@CustomOp.define("d9d_triton::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by Triton, see :func:`d9d_nn.ops.rms_norm.rms_norm`.

    Args:
        x: [..., D], of any strides.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of ``x``, contiguous.

    Raises:
        TypeError: the kernel does not support the dtype of x or weight.
        ValueError: x and weight differ in their number of features.
    """
    check_floats("rms_norm", x=x, weight=weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm.triton: x {list(x.shape)} and weight {list(weight.shape)} must have the shapes [..., D] and [D]"
        )
    out = empty_like(x)
    fill_norm(out, x, weight, eps)
    return out


def fill_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None, total: Tensor | None = None
) -> None:
    """RMSNorm by Triton, forward into given memory: writes the norm and, with ``added``, the sum.

    Args:
        out: [..., D], contiguous; receives the norm.
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        added: [..., D], added to x before the norm; ``None`` for no addition.
        total: [..., D], contiguous; receives the sum.
    """
    if not out.numel():
        return
    rows = as_rows(x)
    # The kernel needs valid pointers even for arguments that it does not use.
    others = rows if added is None else as_rows(added)
    sums = out if total is None else total
    count, features = rows.shape  # len() of a tensor takes a microsecond
    tile = _tile(features)
    normalise[(cdiv(count, tile["ROWS"]),)](
        out, sums, rows, others, weight, count, features, *rows.stride(), *others.stride(),
        weight.stride(0), eps, **tile, ADDS=added is not None, **OPTIONS,
    )  # fmt: skip


@CustomOp.define("d9d_triton::rms_norm_backward")
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    of_x: bool,
    of_weight: bool,
    residual: Tensor | None = None,
    also: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm by Triton: gradients of :func:`rms_norm`.

    Args:
        grad: [..., D], gradient of the output; of any strides, expanded ones too.
        x: [..., D].
        weight: [D].
        eps: same value as in the forward.
        of_x: whether the gradient of x is needed.
        of_weight: whether the gradient of the weight is needed.
        residual: [..., D], further gradient of x, added before the sum is rounded; ``None`` for none.
        also: second dtype in which to return the gradient of x; only with ``of_x``.

    Returns:
        The gradients of x and of the weight, in their dtypes, and the gradient of x in the second dtype; an empty
        tensor for each one that is not needed.
    """
    grad_x, twice = _rows_gradients(x, of_x, also)
    if not x.numel():
        return grad_x, weight.new_zeros(weight.shape if of_weight else 0), twice
    rows, grads = as_rows(x), as_rows(grad)
    others = as_rows(residual) if of_x and residual is not None else grads
    count, features = rows.shape
    tile = _tile(features)
    programs = persistent_programs(x, cdiv(count, tile["ROWS"]))
    # float32 [P, D]; the kernel needs valid pointers even for arguments that it does not use.
    partial = torch.empty((programs, features) if of_weight else 0, dtype=torch.float32, device=x.device)
    differentiate[(programs,)](
        grad_x, twice, partial, grads, others, rows, weight, count, features,
        *grads.stride(), *others.stride(), *rows.stride(), weight.stride(0), eps, **tile,
        OF_X=of_x, OF_WEIGHT=of_weight, ADDS=others is not grads, TWICE=also is not None,
        AHEAD=x.element_size() == 2 and features <= _MOST_FEATURES_AHEAD, **OPTIONS,
    )  # fmt: skip
    return grad_x, column_sums(partial, weight.dtype) if of_weight else weight.new_empty(0), twice


def _rows_gradients(x: Tensor, of_x: bool, also: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Memory for the gradient of x in its own dtype and in the dtype ``also``; empty tensors where not needed."""
    return (
        empty_like(x) if of_x else x.new_empty(0),
        x.new_empty(0) if also is None else x.new_empty(x.shape, dtype=also),
    )


def _tile(features: int) -> dict[str, int]:
    """Rows and features of a program's tile, powers of two, and its warps: about 16 elements per thread."""
    width = next_power_of_2(features)
    return {"ROWS": max(1, _TILE // width), "FEATURES": width, "num_warps": min(16, max(4, width // 512))}


@rms_norm.register_fake
def _fake(x: Tensor, _weight: Tensor, _eps: float) -> Tensor:
    return empty_like(x)


@rms_norm_backward.register_fake
def _fake_backward(
    _grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _eps: float,
    of_x: bool,
    of_weight: bool,
    _residual: Tensor | None = None,
    also: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, twice = _rows_gradients(x, of_x, also)
    return grad_x, weight.new_empty(weight.shape if of_weight else 0), twice


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, _ = ctx.needs_input_grad
    grad_x, grad_weight, _ = rms_norm_backward(grad, x, weight, ctx.eps, of_x, of_weight)
    return grad_x if of_x else None, grad_weight if of_weight else None, None


rms_norm.register_autograd(_backward, setup_context=_keep)
