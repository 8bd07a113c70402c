"""Matrix products of split layers that overlap with the all-gather or reduce-scatter of positions, with gradients.

Column-wise layers all-gather their rows, row-wise layers reduce-scatter their outputs; the backward does the reverse.
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", figure 5, has the same
collectives, without overlap.

Shapes: B samples, S positions, R ranks, H features of hidden states, O features of a layer on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from d9d_core.deferral import Deferral
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from d9d_parallel.ranks import Ranks
from d9d_parallel.tensor_parallel import micro_pipeline, symmetric_memory
from d9d_parallel.tensor_parallel.collectives import check_divides

#: Deferral of a weight gradient, and the weight's gradient edge; ``None`` leaves the gradient to autograd.
_Later = tuple[Deferral, GradientEdge] | None


class AsyncProducts:
    """Asynchronous tensor-parallel products, which overlap with the all-gather or reduce-scatter of positions.

    Args:
        ranks: ranks of ``tp``.
        symmetric: whether the ranks can access each other's memory, see
            :mod:`d9d_parallel.tensor_parallel.symmetric_memory`.
        in_graphs: whether compiled graphs may use symmetric memory too; only if all graphs run on one stream.
    """

    def __init__(self, ranks: Ranks, *, symmetric: bool, in_graphs: bool = False) -> None:
        self.ranks, self.symmetric, self.in_graphs = ranks, symmetric, in_graphs

    def columns(
        self, rows: Tensor, weights: Sequence[Tensor], deferrals: Sequence[Deferral | None]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gather rows and multiply them by several weights. Collective over the ranks, in forward and backward.

        Args:
            rows: [B, S / R, H].
            weights: [O, H] each; cast under autocast.
            deferrals: for each weight an object that computes its gradient later (zero-bubble pipelines), or ``None``.

        Returns:
            All rows [B, S, H], whose gradients are summed over the ranks, and a product [B, S, O] for each weight.
        """
        weights = [_as_autocast(weight) for weight in weights]
        later = tuple(_later(weight, deferral) for weight, deferral in zip(weights, deferrals, strict=True))
        given = [weight if one is None else weight.detach() for weight, one in zip(weights, later, strict=True)]
        with torch.autocast(rows.device.type, enabled=False):
            whole, *outs = _Columns.apply(rows, _reason(rows, later), self, later, *given)
        return whole, tuple(outs)

    def row(self, rows: Tensor, weight: Tensor, deferral: Deferral | None) -> Tensor:
        """Multiply rows, and reduce-scatter the product. Collective over the ranks, in forward and backward.

        Args:
            rows: [B, S, I], the I features of this rank; cast under autocast.
            weight: [H, I]; cast under autocast.
            deferral: object that computes the weight gradient later (zero-bubble pipelines), or ``None``.

        Returns:
            This rank's positions [B, S / R, H].

        Raises:
            ValueError: the ranks do not divide S.
        """
        check_divides(rows.shape[1], self.ranks)
        rows, weight = _as_autocast(rows), _as_autocast(weight)
        later = _later(weight, deferral)
        given = weight if later is None else weight.detach()
        out: Tensor
        with torch.autocast(rows.device.type, enabled=False):
            if torch.compiler.is_compiling():
                out = _Row.apply(rows, given, None, self, later)
            else:
                kept = _KeepRow.apply(rows, given, _reason(rows, (later,)), later)
                out = _SumRow.apply(kept, given.detach(), self, kept.grad_fn)
        return out

    def gather_multiply(self, rows: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gather rows and multiply them, with symmetric memory if this call can use it.

        See :func:`d9d_parallel.tensor_parallel.micro_pipeline.gather_multiply`.
        """
        if weights and self._fuses(rows, weights):
            return symmetric_memory.gather_multiply(rows, weights, self.ranks)
        return micro_pipeline.gather_multiply(rows, weights, self.ranks)

    def multiply_scatter(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype, besides: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Multiply, and sum over the products and over the ranks, with symmetric memory if this call can use it.

        See :func:`d9d_parallel.tensor_parallel.micro_pipeline.multiply_scatter`.
        """
        if rows and besides is None and dtype == rows[0].dtype and self._fuses(rows[0], weights):
            out = symmetric_memory.multiply_scatter(rows, weights, self.ranks)
            return lambda: out
        return micro_pipeline.multiply_scatter(rows, weights, self.ranks, dtype=dtype, besides=besides)

    def _fuses(self, rows: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether a call uses symmetric memory. All ranks decide the same, because they run the same program.

        Each process group has one set of buffers, so two simultaneous calls on different streams (a pipeline overlaps a
        forward with a backward) would overwrite each other's data. Therefore only calls on the default stream use
        symmetric memory. The stream of a compiled graph is unknown while it is traced: ``in_graphs`` decides.
        """
        if not self.symmetric or any(one.dtype != rows.dtype for one in weights):
            return False
        if torch.compiler.is_compiling():
            return self.in_graphs
        return torch.cuda.current_stream(rows.device) == torch.cuda.default_stream(rows.device)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        _reason: Tensor | None,
        products: AsyncProducts,
        later: Sequence[_Later],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # the gathered rows mostly have no gradient, because nothing else reads them
        ctx.products, ctx.later = products, later
        whole, outs = products.gather_multiply(rows, weights)
        ctx.save_for_backward(whole, *weights)
        return (whole, *outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: Tensor | None, *of_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        finish = None
        # Autograd may call this without a gradient of any output. This happens on all ranks or on none, so none waits.
        if ctx.needs_input_grad[0] and any(grad is not None for grad in (of_whole, *of_outs)):
            there = [(grad, weight.t()) for grad, weight in zip(of_outs, weights, strict=True) if grad is not None]
            finish = ctx.products.multiply_scatter(
                [grad for grad, _ in there], [weight for _, weight in there], whole.dtype, of_whole
            )
        # Weight gradients are computed while the last parts are in transit.
        of_weights = [
            None if grad is None else _weight_gradient(grad, whole, weight, later, wanted=wanted)
            for grad, weight, later, wanted in zip(of_outs, weights, ctx.later, ctx.needs_input_grad[4:], strict=True)
        ]
        return None if finish is None else finish(), None, None, None, *of_weights


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, _reason: Tensor | None, products: AsyncProducts, later: _Later
    ) -> Tensor:
        ctx.products, ctx.later = products, later
        ctx.save_for_backward(rows, weight)
        return products.multiply_scatter([rows], [weight], rows.dtype)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        whole, outs = ctx.products.gather_multiply(grad, [weight.t()] if ctx.needs_input_grad[0] else [])
        of_weight = _weight_gradient(whole, rows, weight, ctx.later, wanted=ctx.needs_input_grad[1])
        return outs[0] if outs else None, of_weight, None, None, None


class _KeepRow(torch.autograd.Function):
    """First half of :class:`_Row`: saves rows and weight, and computes the weight gradient at the end.

    The recomputation of a checkpointed block stops at the last tensor that the backward needs. This half saves them
    before the product and the reduce-scatter, so a block that ends with this layer, as is common, recomputes neither.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, _reason: Tensor | None, later: _Later) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.later = later
        ctx.save_for_backward(rows, weight)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, rows, weight = ctx.found
        ctx.found = None
        of_weight = _weight_gradient(whole, rows, weight, ctx.later, wanted=ctx.needs_input_grad[1])
        return of_rows, of_weight, None, None


class _SumRow(torch.autograd.Function):
    """Second half of :class:`_Row`: the product and its reduce-scatter; the backward returns the gradient of ``rows``.

    The backward also gives the gathered gradient to the first half, which computes the weight gradient.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, weight: Tensor, products: AsyncProducts, first: Any) -> Tensor:
        ctx.products, ctx.first = products, first
        return products.multiply_scatter([kept], [weight], kept.dtype)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.first.saved_tensors  # read once: a checkpoint provides them only once
        whole, outs = ctx.products.gather_multiply(grad, [weight.t()] if ctx.first.needs_input_grad[0] else [])
        ctx.first.found = whole, rows, weight
        return outs[0] if outs else None, None, None, None


def _weight_gradient(grad: Tensor, rows: Tensor, weight: Tensor, later: _Later, *, wanted: bool) -> Tensor | None:
    """Gradient of a weight [O, I] from the gradient [B, S, O] of its product and rows [B, S, I]; None if deferred."""
    rows, dtype = rows.detach(), weight.dtype

    def compute() -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).t().mm(rows.reshape(-1, rows.shape[-1]).to(dtype))

    if later is not None:
        deferral, edge = later
        deferral.add(edge, compute)
        return None
    return compute() if wanted else None


def _later(weight: Tensor, deferral: Deferral | None) -> _Later:
    """Deferral and gradient edge of a weight; ``None`` in compiled graphs, or if its gradient is not deferred."""
    if deferral is None or not deferral.wanted or torch.compiler.is_compiling():
        return None
    return (deferral, get_gradient_edge(weight)) if weight.requires_grad and torch.is_grad_enabled() else None


def _reason(rows: Tensor, later: Sequence[_Later]) -> Tensor | None:
    """Empty input that requires a gradient, so that autograd runs a backward for deferred weight gradients alone."""
    if rows.requires_grad or not any(one is not None for one in later):
        return None
    return rows.new_empty(0).requires_grad_()


def _as_autocast(x: Tensor) -> Tensor:
    """Cast an argument of a product as autocast does, if autocast is on; the cast is differentiable."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
