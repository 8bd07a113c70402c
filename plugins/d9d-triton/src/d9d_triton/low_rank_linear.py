"""Backend of the op ``low_rank_linear``: products that add in place, instead of passes over memory that add.

The update of a layer is written first, and the product of the layer adds to it. The products for the gradient of the
input add to each other. One kernel reads the gradient of an output once, and computes from it both gradients of the
update: the gradient of ``x A^T`` and the gradient of B.

Shapes: I features of the input, T rows (all leading dims), O features of an output, r rank, R sum of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.low_rank_linear import add_parts, differentiate_update, widen
from d9d_triton.launch import OPTIONS, as_rows, cdiv, check_floats, next_power_of_2

#: Largest rank for which one kernel computes both gradients of an update. For higher ranks, its partial sums would take
#: nearly as much memory as the gradient that it reads; two products read the gradient twice instead.
MOST_RANK = 32
#: Rows of a tile; features of a tile of 16-bit numbers and of other tiles, which need more memory; and number of
#: programs along the rows. On an H200, rank 16, 8,192 rows: 25 us for 4,096 features and 70 for 12,288, where two
#: products take 47 and 116.
_ROWS, _FEATURES, _FEWER_FEATURES, _PROGRAMS = 32, 256, 128, 16
#: Smallest side of a tile of a product.
_LEAST_SIDE = 16
#: Largest number of columns of a tall matrix that the kernel multiplies, and sides of its tiles.
_MOST_COMMON, _TILE_ROWS, _TILE_COLUMNS = 128, 64, 128
#: Elements that a program of the last kernel sums.
_BLOCK = 1024


def build(_signature: OpSignature) -> Callable[..., tuple[Tensor, ...]]:
    """Build the backend ``triton`` of the op ``low_rank_linear``; its function is the same for every signature."""
    return low_rank_linear


def low_rank_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scales: Sequence[float],
) -> tuple[Tensor, ...]:
    """Linear layers with low-rank updates, see :func:`d9d_nn.ops.low_rank_linear.low_rank_linear`.

    Args:
        x: [..., I].
        weights: [O, I] each; O may differ.
        biases: [O] each, or ``None``.
        downs: [r, I] each; r may differ.
        ups: [O, r] each.
        scales: factor of each update.

    Returns:
        [..., O] for each layer, contiguous.

    Raises:
        TypeError: the tensors are of several dtypes, or of a dtype that the kernel does not support.
        ValueError: shapes do not fit together.
    """
    known = [bias for bias in biases if bias is not None]
    _check(x, (*weights, *known, *downs, *ups))
    for layer in zip(weights, biases, downs, ups, strict=True):
        _check_shapes(x, *layer)
    rows, tensors = as_rows(x), (*weights, *downs, *ups, *known)
    if torch.is_grad_enabled():
        outs = _LowRankLinear.apply(rows, tuple(bias is not None for bias in biases), tuple(scales), *tensors)
    else:
        _, *outs = multiply_layers(rows, list(weights), list(biases), _stacked(downs), list(ups), list(scales))
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


@CustomOp.define("d9d_triton::low_rank_linear")
def multiply_layers(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    down: Tensor,
    ups: Sequence[Tensor],
    scales: Sequence[float],
) -> list[Tensor]:
    """Linear layers with low-rank updates, forward.

    Args:
        x: [T, I].
        weights: [O, I] each.
        biases: [O] each, or ``None``.
        down: A of all layers, [R, I].
        ups: [O, r] each.
        scales: factor of each update.

    Returns:
        ``x A^T`` of all layers [T, R], and each output [T, O].
    """
    low = x.mm(down.t())
    found = [low]
    for weight, bias, part, up, scale in zip(weights, biases, _parts(low, ups), ups, scales, strict=True):
        found.append(widened(part, up.t(), scale, bias).addmm_(x, weight.t()))
    return found


@CustomOp.define("d9d_triton::low_rank_linear_backward")
def differentiate_layers(
    grads: Sequence[Tensor],
    low: Tensor,
    weights: Sequence[Tensor],
    down: Tensor,
    ups: Sequence[Tensor],
    scales: Sequence[float],
    of_x: bool,
) -> list[Tensor]:
    """Linear layers with low-rank updates, backward: gradients of x, of ``x A^T`` and of all B.

    Args:
        grads: gradient of each output, [T, O].
        low: ``x A^T`` of all layers, [T, R].
        weights: [O, I] each.
        down: A of all layers, [R, I].
        ups: [O, r] each.
        scales: factor of each update.
        of_x: whether the gradient of x is needed.

    Returns:
        Gradients of x, [T, I] or an empty tensor; of ``x A^T``, [T, R]; and of each B, [O, r].
    """
    grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
    of_low = torch.empty(low.shape, dtype=low.dtype, device=low.device)
    layers = zip(grads, _parts(low, ups), ups, scales, _parts(of_low, ups), strict=True)
    of_ups = [update_gradients(*layer) for layer in layers]
    if not of_x:
        return [low.new_empty(0), of_low, *of_ups]
    of_rows = widened(of_low, down)
    for grad, weight in zip(grads, weights, strict=True):
        of_rows.addmm_(grad, weight)
    return [of_rows, of_low, *of_ups]


def widened(low: Tensor, matrix: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """Product ``scale * low @ matrix + bias`` of a tall and a wide matrix.

    Args:
        low: [T, R], with adjacent columns.
        matrix: [R, N], of any strides.
        scale: factor of the product.
        bias: [N].

    Returns:
        [T, N], contiguous.
    """
    (rows, rank), columns = low.shape, matrix.shape[1]
    if rank > _MOST_COMMON:
        added = low.new_empty(()) if bias is None else bias  # with beta 0, torch does not read it
        return torch.addmm(added, low, matrix, beta=0 if bias is None else 1, alpha=scale)
    out = low.new_empty(rows, columns)
    if out.numel():
        # The kernel needs a valid pointer even for a bias that it does not use.
        widen[(cdiv(rows, _TILE_ROWS), cdiv(columns, _TILE_COLUMNS))](
            out, low, matrix, out if bias is None else bias.contiguous(), rows, columns, rank, low.stride(0),
            *matrix.stride(), float(scale), ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS,
            RANK=max(_LEAST_SIDE, next_power_of_2(rank)), BIASED=bias is not None, PRECISION="ieee", num_warps=4,
            **OPTIONS,
        )  # fmt: skip
    return out


def update_gradients(grad: Tensor, low: Tensor, up: Tensor, scale: float, of_low: Tensor) -> Tensor:
    """Gradients of ``x A^T`` and of B, from the gradient of the output ``scale * (x A^T) B^T``.

    Args:
        grad: [T, O], with adjacent columns.
        low: ``x A^T``, [T, r], with adjacent columns.
        up: B, [O, r].
        scale: factor of the update.
        of_low: [T, r], with adjacent columns; receives the gradient of ``x A^T``.

    Returns:
        Gradient of B, [O, r], contiguous.
    """
    (rows, features), rank = grad.shape, up.shape[1]
    if rank > MOST_RANK or not grad.numel():
        # The products are scaled before they are rounded; with beta 0, torch does not read the first argument.
        torch.addmm(of_low, grad, up, beta=0, alpha=scale, out=of_low)
        return torch.addmm(low.new_empty(()), grad.t(), low, beta=0, alpha=scale)
    width = _FEATURES if grad.element_size() == 2 else _FEWER_FEATURES
    steps = cdiv(cdiv(rows, _ROWS), _PROGRAMS)
    parts, blocks = cdiv(features, width), cdiv(rows, _ROWS * steps)
    of_up = up.new_empty(features, rank)
    low_parts = torch.empty(parts, rows, rank, dtype=torch.float32, device=grad.device)
    up_parts = torch.empty(blocks, features, rank, dtype=torch.float32, device=grad.device)
    differentiate_update[(blocks, parts)](
        low_parts, up_parts, grad, up.contiguous(), low, rows, features, rank, grad.stride(0), low.stride(0),
        float(scale), ROWS=_ROWS, STEPS=steps, FEATURES=width, RANK=max(_LEAST_SIDE, next_power_of_2(rank)),
        PRECISION="ieee", num_warps=4, num_stages=3, **OPTIONS,
    )  # fmt: skip
    sizes = rows * rank, features * rank
    programs = cdiv(sizes[0], _BLOCK)
    add_parts[(programs + cdiv(sizes[1], _BLOCK),)](
        of_low, of_up, low_parts, up_parts, *sizes, parts, blocks, programs, rank, of_low.stride(0), BLOCK=_BLOCK,
        **OPTIONS,
    )  # fmt: skip
    return of_up


def _stacked(downs: Sequence[Tensor]) -> Tensor:
    return downs[0] if len(downs) == 1 else torch.cat(list(downs))


def _parts(low: Tensor, ups: Sequence[Tensor]) -> Sequence[Tensor]:
    """Columns of each layer, [T, r]."""
    return torch.split(low, [up.shape[1] for up in ups], 1)


def _check(x: Tensor, others: Sequence[Tensor]) -> None:
    check_floats("low_rank_linear", x=x)
    if any(tensor.dtype != x.dtype for tensor in others):
        names = ", ".join(sorted({str(tensor.dtype) for tensor in (x, *others)}))
        raise TypeError(f"low_rank_linear.triton: all tensors must be of one dtype, not {names}")


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> None:
    """Raise an error for shapes with which a kernel would read out of bounds, or the factors of another layer."""
    features, rank = up.shape
    fits = down.shape == (rank, x.shape[-1]) and weight.shape == (features, x.shape[-1])
    if not fits or (bias is not None and bias.shape != (features,)):
        names = ("x", x), ("weight", weight), ("bias", bias), ("A", down), ("B", up)
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in names if tensor is not None)
        raise ValueError(
            f"low_rank_linear.triton: {shapes} must have the shapes [..., I], [O, I], [O], [r, I] and [O, r]"
        )


class _LowRankLinear(torch.autograd.Function):
    """Linear layers with low-rank updates; tensors are given as all W, all A, all B, and the biases."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, biased: tuple[bool, ...], scales: tuple[float, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(scales)
        weights, downs, ups = tensors[:count], tensors[count : 2 * count], tensors[2 * count : 3 * count]
        known = iter(tensors[3 * count :])
        biases, down = [next(known) if has else None for has in biased], _stacked(downs)
        low, *outs = multiply_layers(x, list(weights), biases, down, list(ups), list(scales))
        ctx.save_for_backward(x, low, down, *weights, *ups)
        ctx.scales, ctx.biased = scales, biased
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, *tensors = ctx.saved_tensors
        count = len(ctx.scales)
        weights, ups = tensors[:count], tensors[count:]
        of_x, _, _, *needed = ctx.needs_input_grad
        wanted = [needed[count * place : count * (place + 1)] for place in range(3)]
        of_rows, of_low, *of_ups = differentiate_layers(list(grads), low, weights, down, ups, list(ctx.scales), of_x)
        # Outside of the operator: if the compiler recomputes x, it can do so in one pass with what x came from.
        of_downs = torch.split(of_low.t().mm(x), [up.shape[1] for up in ups]) if any(wanted[1]) else [None] * count
        biased = [grad for grad, has in zip(grads, ctx.biased, strict=True) if has]
        return (
            of_rows if of_x else None, None, None,
            *(grad.t().mm(x) if one else None for grad, one in zip(grads, wanted[0], strict=True)),
            *(grad if one else None for grad, one in zip(of_downs, wanted[1], strict=True)),
            *(grad if one else None for grad, one in zip(of_ups, wanted[2], strict=True)),
            *(grad.sum(0) if one else None for grad, one in zip(biased, needed[3 * count :], strict=True)),
        )  # fmt: skip


@multiply_layers.register_fake
def _fake(
    x: Tensor,
    weights: Sequence[Tensor],
    _biases: Sequence[Tensor | None],
    down: Tensor,
    _ups: Sequence[Tensor],
    _scales: Sequence[float],
) -> list[Tensor]:
    rows = x.shape[0]
    return [x.new_empty(rows, down.shape[0]), *(x.new_empty(rows, weight.shape[0]) for weight in weights)]


@differentiate_layers.register_fake
def _fake_backward(
    _grads: Sequence[Tensor],
    low: Tensor,
    _weights: Sequence[Tensor],
    down: Tensor,
    ups: Sequence[Tensor],
    _scales: Sequence[float],
    of_x: bool,
) -> list[Tensor]:
    rows = low.new_empty((low.shape[0], down.shape[1]) if of_x else 0)
    return [rows, low.new_empty(low.shape), *(up.new_empty(up.shape) for up in ups)]
