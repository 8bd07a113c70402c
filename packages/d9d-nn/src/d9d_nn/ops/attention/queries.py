"""Causal attention of queries at some positions to all keys, in rectangles for fused kernels without a mask.

Attention in a rectangle is a custom op of torch, which ``torch.compile`` does not split: the kernel is chosen in the
call. Code that combines rectangles (it weights outputs and adds up gradients) is plain PyTorch outside of the ops, so
that a compiled block runs it in few passes over memory, together with neighbouring layers.

Shapes: B samples, S positions, Q queries (P of a rectangle, T keys of it), N query heads, K key/value heads, D features
of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from d9d_nn.ops.attention import partial
from d9d_nn.ops.attention.partial import Rectangle, rectangles

#: Rectangle as numbers, for custom ops: start and end of its queries, start and end of its keys, causal (0 or 1).
Numbers = tuple[int, int, int, int, int]
#: Piece of a dim: its length, and for each rectangle that covers it, the rectangle's index and the offset in it.
Piece = tuple[int, tuple[tuple[int, int], ...]]


class QueryRectangles:
    """Rectangles of queries at some positions, used instead of a mask.

    Args:
        queries: positions of the queries, as contiguous ranges in ascending order.
        length: S.
    """

    def __init__(self, queries: Sequence[range], length: int) -> None:
        found = rectangles(queries, [range(length)])
        count = sum(len(run) for run in queries)
        self.numbers: tuple[Numbers, ...] = tuple(map(_numbers, found))
        #: Pieces of the queries and of the keys; all positions of a piece are covered by the same rectangles.
        self.rows: tuple[Piece, ...] = _pieces([one.queries for one in found], count)
        self.columns: tuple[Piece, ...] = _pieces([one.keys for one in found], length)
        assert sum(len(reached) for _, reached in self.rows) == len(found)  # as all keys are one run

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention.

        Args:
            query: [B, Q, N, D].
            key: [B, S, K, D].
            value: [B, S, K, D].

        Returns:
            [B, Q, N, D], in the dtype of autocast if it is on.
        """
        device = query.device.type
        if torch.is_autocast_enabled(device):  # autocast does not cast the arguments of custom ops
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out: Tensor = _Attention.apply(query, key, value, self.numbers, self.rows, self.columns)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        numbers: Sequence[Numbers],
        rows: Sequence[Piece],
        columns: Sequence[Piece],
    ) -> Tensor:
        parts = [forward(query, key, value, one) for one in numbers]
        runs = [reduce(_merged, [parts[place] for place, _ in reached]) for _, reached in rows]
        out = torch.cat([one for one, _ in runs], dim=1)
        ctx.numbers, ctx.rows, ctx.columns = numbers, rows, columns
        ctx.save_for_backward(query, key, value, out, *(total for _, total in runs))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *totals = ctx.saved_tensors
        of_run = {place: run for run, (_, reached) in enumerate(ctx.rows) for place, _ in reached}
        parts = [
            backward(grad, query, key, value, out, totals[of_run[place]], one) for place, one in enumerate(ctx.numbers)
        ]
        pieces = ctx.rows, ctx.columns, ctx.columns
        grads = [_added([part[which] for part in parts], of) for which, of in enumerate(pieces)]
        return *grads, None, None, None


@torch.library.custom_op("d9d_nn::attention_of_queries", mutates_args=())
def forward(query: Tensor, key: Tensor, value: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention in a rectangle. The op slices its inputs itself: a compiled block would copy each slice separately.

    Args:
        query: [B, Q, N, D].
        key: [B, S, K, D].
        value: [B, S, K, D].
        numbers: the rectangle, see :data:`Numbers`.

    Returns:
        The output [B, P, N, D], and the log-sum-exps over the rectangle's keys [B, N, P], float32 or wider; both
        contiguous.
    """
    one = _rectangle(numbers)
    inputs = query[:, one.queries], key[:, one.keys], value[:, one.keys]
    out, total = partial.attend(*inputs, causal=one.causal)
    return out.contiguous(), total.transpose(1, 2).contiguous()  # the strides that CUDA's kernels write, see _fake


@torch.library.custom_op("d9d_nn::attention_of_queries_backward", mutates_args=())
def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of a rectangle of queries: gradients of queries [B, P, N, D], keys and values [B, T, K, D]; contiguous.

    Args:
        grad: gradient of the output of the attention to all keys, [B, Q, N, D].
        query: [B, Q, N, D].
        key: [B, S, K, D].
        value: [B, S, K, D].
        out: output of the attention to all keys, [B, Q, N, D].
        total: log-sum-exps over all keys, for the rectangle's queries, [B, N, P].
        numbers: the rectangle, see :data:`Numbers`.
    """
    one = _rectangle(numbers)
    rows, columns = one.queries, one.keys
    inputs = query[:, rows], key[:, columns], value[:, columns], out[:, rows], total.transpose(1, 2)
    of_query, of_key, of_value = partial.attend_backward(grad[:, rows], *inputs, causal=one.causal)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


def _numbers(one: Rectangle) -> Numbers:
    return one.queries.start, one.queries.stop, one.keys.start, one.keys.stop, int(one.causal)


def _rectangle(numbers: Sequence[int]) -> Rectangle:
    first, last, first_key, last_key, causal = numbers
    return Rectangle(slice(first, last), slice(first_key, last_key), causal=bool(causal))


def _pieces(places: Sequence[slice], length: int) -> tuple[Piece, ...]:
    """Cut a dim of ``length`` at the starts and ends of rectangles, and list the rectangles that cover each piece."""
    cuts = sorted({0, length, *(end for place in places for end in (place.start, place.stop))})
    return tuple(
        (
            stop - start,
            tuple((number, start - of.start) for number, of in enumerate(places) if of.start <= start < of.stop),
        )
        for start, stop in pairwise(cuts)
    )


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention of the same queries to two parts of the keys; outputs [B, P, N, D], log-sum-exps [B, N, P]."""
    (out, total), (of_other, total_of_other) = one, other
    start = out.to(total.dtype)
    share = (total_of_other - total).sigmoid().transpose(1, 2).unsqueeze(-1)
    mixed = torch.addcmul(start, of_other - start, share).to(out.dtype)
    return mixed, torch.logaddexp(total, total_of_other)


def _added(parts: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """Add gradients [B, P or T, heads, D] of rectangles at their positions in [B, Q or S, heads, D], rounded once."""
    found = []
    for length, reached in pieces:
        here = [parts[number][:, start : start + length] for number, start in reached]
        if not here:  # no query sees these keys
            found.append(parts[0].new_zeros(parts[0].shape[0], length, *parts[0].shape[2:]))
        elif len(here) > 2:
            found.append(reduce(torch.add, [part.to(_wide(part)) for part in here]).to(here[0].dtype))
        else:  # a sum of two tensors is rounded only once anyway
            found.append(reduce(torch.add, here))
    return torch.cat(found, dim=1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@forward.register_fake
def _fake(query: Tensor, _key: Tensor, _value: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    samples, _, heads, features = query.shape
    count = numbers[1] - numbers[0]
    out = query.new_empty(samples, count, heads, features)
    return out, query.new_empty(samples, heads, count, dtype=_wide(query))


@backward.register_fake
def _fake_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _total: Tensor, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = numbers[1] - numbers[0], numbers[3] - numbers[2]
    of_query, of_key, of_value = (
        one.new_empty(one.shape[0], count, *one.shape[2:])
        for one, count in ((query, rows), (key, columns), (value, columns))
    )
    return of_query, of_key, of_value
