"""Backends of the ops ``permute`` and ``unpermute``: copy tokens to the rows of their experts, and sum the rows.

Summing a token's rows with their weights is one pass over memory; so is its backward, for rows and weights together.
Sums run over the choices of a token in a fixed order, so the same input gives the same bits. If each choice has its own
row, as without expert parallelism, the copy kernel reads each token once; otherwise torch's ``index_select`` copies row
by row.

Shapes: T tokens, H features, k choices of each token, R rows; for slots and places see the reference implementations
(:mod:`d9d_moe.dispatch.permutation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.permutation import copy_to_rows, differentiate, sum_rows
from d9d_triton.launch import OPTIONS, cdiv, check_floats, empty_like, next_power_of_2

#: Number of features that a program copies or sums; number of elements of a backward's tile (choices x features).
_BLOCK, _TILE = 1024, 4096


def build_permute(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``triton`` of the op ``permute``."""
    return permute


def build_unpermute(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``triton`` of the op ``unpermute``."""
    return unpermute


def permute(tokens: Tensor, slots: Tensor, places: Tensor, *, absent: bool = False) -> Tensor:
    """Permute tokens by Triton: copy each token to its rows, see :func:`d9d_moe.dispatch.permutation.permute`.

    Args:
        tokens: [T, H], of any strides.
        slots: int64 [R], choice of each row, ``token * k + choice``.
        places: int64 [T, k], row of each choice.
        absent: whether some choices may have no row.

    Returns:
        [R, H].

    Raises:
        TypeError: the kernels do not support the dtype of the tokens.
    """
    rows: Tensor = copy_tokens(tokens, slots, places, absent)
    return rows


def unpermute(
    rows: Tensor, slots: Tensor, places: Tensor, weights: Tensor | None = None, *, absent: bool = False
) -> Tensor:
    """Undo a permutation by Triton: sum each token's rows, see :func:`d9d_moe.dispatch.permutation.unpermute`.

    Args:
        rows: [R, H], of any strides.
        slots: int64 [R], choice of each row; not used with weights.
        places: int64 [T, k], row of each choice.
        weights: [T, k], factor of each choice's row; ``None`` for 1.
        absent: whether some choices may have no row. With weights, rows of no choice get zero gradients.

    Returns:
        [T, H] in the dtype of ``rows``.

    Raises:
        TypeError: the kernels do not support the dtype of rows or weights.
        ValueError: weights and places differ in shape.
    """
    total: Tensor = (
        plain_sum(rows, slots, places, absent) if weights is None else weighted_sum(rows, places, weights, absent)
    )
    return total


@CustomOp.define("d9d_triton::copy_tokens")
def copy_tokens(tokens: Tensor, slots: Tensor, places: Tensor, absent: bool) -> Tensor:
    """Custom op behind :func:`permute`."""
    check_floats("permute", tokens=tokens)
    if absent or len(slots) != places.numel():  # rows that no place refers to must be copied too
        return tokens.index_select(0, slots // places.shape[1])
    features = tokens.shape[1]
    out = tokens.new_empty(len(slots), features)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(features))
        copy_to_rows[(len(tokens), cdiv(features, block))](
            out, tokens, places.contiguous(), features, *tokens.stride(), CHOICES=places.shape[1], BLOCK=block,
            num_warps=max(1, block // 128), **OPTIONS,
        )  # fmt: skip
    return out


@CustomOp.define("d9d_triton::sum_copies")
def sum_copies(rows: Tensor, places: Tensor) -> Tensor:
    """Sum rows [R, H] to [T, H] by places int64 [T, k]: gradient of :func:`permute`."""
    return _sum(rows, places, None)


@CustomOp.define("d9d_triton::plain_sum")
def plain_sum(rows: Tensor, slots: Tensor, places: Tensor, absent: bool) -> Tensor:  # noqa: ARG001 - its backward
    """Custom op behind :func:`unpermute` without weights."""
    check_floats("unpermute", rows=rows)
    return _sum(rows, places, None)


@CustomOp.define("d9d_triton::weighted_sum")
def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor, absent: bool) -> Tensor:  # noqa: ARG001 - its backward
    """Custom op behind :func:`unpermute` with weights."""
    check_floats("unpermute", rows=rows, weights=weights)
    if weights.shape != places.shape:
        shapes = f"weights {list(weights.shape)} and places {list(places.shape)}"
        raise ValueError(f"unpermute.triton: {shapes} must have the same shape")
    return _sum(rows, places, weights)


@CustomOp.define("d9d_triton::weighted_sum_backward")
def weighted_sum_backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor, absent: bool, of_rows: bool, of_weights: bool
) -> tuple[Tensor, Tensor]:
    """Permutation by Triton: gradients of the weighted sum of :func:`unpermute`.

    Args:
        grad: [T, H], gradient of the sums; of any strides, expanded ones too.
        rows: [R, H].
        places: int64 [T, k].
        weights: [T, k].
        absent: whether some rows may have no place that refers to them.
        of_rows: whether the gradient of the rows is needed.
        of_weights: whether the gradient of the weights is needed.

    Returns:
        The gradients of rows and weights, in their dtypes; an empty tensor for one that is not needed.
    """
    grad_rows = empty_like(rows) if of_rows else rows.new_empty(0)
    if absent or len(rows) > places.numel():
        grad_rows.zero_()
    grad_weights = empty_like(weights) if of_weights else weights.new_empty(0)
    tokens, choices = places.shape
    if places.numel():
        lanes = next_power_of_2(choices)
        block = min(next_power_of_2(rows.shape[1]), max(16, _TILE // lanes))
        differentiate[(tokens,)](
            grad_rows, grad_weights, grad, rows, places.contiguous(), weights.contiguous(), len(rows),
            *grad.stride(), *rows.stride(), FEATURES=rows.shape[1],
            CHOICES=choices, LANES=lanes, OF_X=of_rows, OF_WEIGHTS=of_weights, BLOCK=block, **OPTIONS,
        )  # fmt: skip
    return grad_rows, grad_weights


def _sum(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    tokens, choices = places.shape
    count, features = rows.shape
    out = rows.new_empty(tokens, features)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(features))
        factors = rows if weights is None else weights.contiguous()  # unused without weights; any valid pointer
        sum_rows[(tokens, cdiv(features, block))](
            out, rows, places.contiguous(), factors, count, features, *rows.stride(),
            CHOICES=choices, WEIGHTED=weights is not None, BLOCK=block, **OPTIONS,
        )  # fmt: skip
    return out


@copy_tokens.register_fake
def _fake_copy(tokens: Tensor, slots: Tensor, _places: Tensor, _absent: bool) -> Tensor:
    return tokens.new_empty(len(slots), tokens.shape[1])


@sum_copies.register_fake
def _fake_sum(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@plain_sum.register_fake
def _fake_plain(rows: Tensor, _slots: Tensor, places: Tensor, _absent: bool) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@weighted_sum.register_fake
def _fake_weighted(rows: Tensor, places: Tensor, _weights: Tensor, _absent: bool) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@weighted_sum_backward.register_fake
def _fake_backward(
    _grad: Tensor, rows: Tensor, _places: Tensor, weights: Tensor, _absent: bool, of_rows: bool, of_weights: bool
) -> tuple[Tensor, Tensor]:
    grad_rows = empty_like(rows) if of_rows else rows.new_empty(0)
    return grad_rows, empty_like(weights) if of_weights else weights.new_empty(0)


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(inputs[2])


def _copy_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sum_copies(grad, *ctx.saved_tensors), None, None, None


def _keep_numbers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    _, slots, places, ctx.absent = inputs
    ctx.save_for_backward(slots, places)


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return copy_tokens(grad, *ctx.saved_tensors, ctx.absent), None, None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    *tensors, ctx.absent = inputs
    ctx.save_for_backward(*tensors)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_rows, _, of_weights, _ = ctx.needs_input_grad
    grads = weighted_sum_backward(grad, *ctx.saved_tensors, ctx.absent, of_rows, of_weights)
    return grads[0] if of_rows else None, None, grads[1] if of_weights else None, None


copy_tokens.register_autograd(_copy_backward, setup_context=_keep_places)
plain_sum.register_autograd(_plain_backward, setup_context=_keep_numbers)
weighted_sum.register_autograd(_sum_backward, setup_context=_keep)
