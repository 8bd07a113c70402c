"""Causal attention of queries at some positions to all keys, in rectangles that fused kernels compute without a mask.

As custom ops of torch, which ``torch.compile`` keeps whole: which kernel computes a rectangle is decided in the call.

Shapes: B samples, S positions, Q queries, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from d9d_nn.ops.attention import partial
from d9d_nn.ops.attention.partial import Rectangle, rectangles


class QueryRectangles:
    """Rectangles of queries at some positions, in the place of a mask.

    Args:
        queries: positions of the queries, runs in ascending order.
        length: S.
    """

    def __init__(self, queries: Sequence[range], length: int) -> None:
        found = rectangles(queries, [range(length)])
        #: First and last of queries and of keys, and whether it is causal, of each rectangle: ops take plain numbers.
        self.numbers = [
            number
            for one in found
            for number in (one.queries.start, one.queries.stop, one.keys.start, one.keys.stop, int(one.causal))
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention.

        Args:
            query: [B, Q, N, D].
            key: [B, S, K, D].
            value: [B, S, K, D].

        Returns:
            [B, Q, N, D], in 16 bits where autocast says so.
        """
        device = query.device.type
        if torch.is_autocast_enabled(device):  # it does not know these ops
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out: Tensor = forward(query, key, value, self.numbers)[0]
        return out


@torch.library.custom_op("d9d_nn::attention_of_queries", mutates_args=())
def forward(query: Tensor, key: Tensor, value: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention and what its backward needs; see :class:`QueryRectangles`.

    Returns:
        The output [B, Q, N, D], contiguous; and the logarithms of the sums of exponentials [B, Q, N], float32 or wider.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    total = out.new_empty(query.shape[:3], dtype=_wide(query))
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # by the first query: the rectangles of a run are neighbours
    for one in _rectangles(numbers):
        rows = one.queries
        part, of_part = partial.attend(query[:, rows], key[:, one.keys], value[:, one.keys], causal=one.causal)
        if rows.start in seen:
            before, of_before = seen.pop(rows.start)
            share = (of_part - of_before).sigmoid().unsqueeze(-1)
            part = torch.lerp(before.to(_wide(query)), part.to(_wide(query)), share)
            of_part = torch.logaddexp(of_before, of_part)
        seen[rows.start] = part, of_part
        out[:, rows], total[:, rows] = part, of_part
    return out, total


@torch.library.custom_op("d9d_nn::attention_of_queries_backward", mutates_args=())
def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous.

    Args:
        grad: gradient of the output, of any strides.
        query: as in :func:`forward`, like ``key``, ``value`` and ``numbers``.
        key: see ``query``.
        value: see ``query``.
        out: output of :func:`forward`.
        total: its second output.
        numbers: see ``query``.
    """
    # Several rectangles share queries, and keys: their gradients are added up in float32.
    grads = [torch.zeros(one.shape, dtype=_wide(query), device=query.device) for one in (query, key, value)]
    for one in _rectangles(numbers):
        rows, columns = one.queries, one.keys
        inputs = query[:, rows], key[:, columns], value[:, columns], out[:, rows], total[:, rows]
        added = partial.attend_backward(grad[:, rows], *inputs, causal=one.causal)
        for of, place, more in zip(grads, (rows, columns, columns), added, strict=True):
            of[:, place] += more
    of_query, of_key, of_value = (of.to(query.dtype) for of in grads)
    return of_query, of_key, of_value


def _rectangles(numbers: Sequence[int]) -> list[Rectangle]:
    rows = [numbers[place : place + 5] for place in range(0, len(numbers), 5)]
    return [Rectangle(slice(a, b), slice(c, d), causal=bool(causal)) for a, b, c, d, causal in rows]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@forward.register_fake
def _fake(query: Tensor, _key: Tensor, _value: Tensor, _numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, out.new_empty(query.shape[:3], dtype=_wide(query))


@backward.register_fake
def _fake_backward(_grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in inputs[:3])
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.numbers = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _of_total: None) -> tuple[Tensor | None, ...]:
    query, key, value, out, total = ctx.saved_tensors
    if grad is None:
        return None, None, None, None
    grads = backward(grad, query, key, value, out, total, ctx.numbers)
    return *(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


forward.register_autograd(_backward, setup_context=_keep)
