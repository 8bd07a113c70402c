"""Tensors that go away and come back as others, while something else is computed: in the forward and in the backward.

Autograd runs functions backward in the order in which they were called forward, reversed. So there are two: that of
the departure comes before what is computed meanwhile, that of the arrival after it. In the backward, gradients leave in
that of the arrival and are awaited in that of the departure. What passes between the two are values that are not there
yet: placeholders stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from d9d_moe.dispatch import Transfer
from d9d_moe.untraced import untraced

Tensors = tuple[Tensor, ...]


def as_arrived(arrived: Tensors, _saved: Tensors) -> Tensors:
    """What arrived is what is wanted."""
    return arrived


class Departure:
    """Tensors that leave, and how their gradients are made of what comes back.

    Args:
        tensors: those that may have gradients.
        saved: what ``settle`` needs; nothing else that it refers to may be large, or change in a recomputation.
        settle: (what came back, ``saved``) -> a gradient for each of the tensors.
    """

    __slots__ = ("_link", "_tensors")

    @untraced  # what the backward does to _Link is nothing that can be traced
    def __init__(
        self,
        tensors: Sequence[Tensor],
        saved: Sequence[Tensor] = (),
        settle: Callable[[Tensors, Tensors], Tensors] = as_arrived,
    ) -> None:
        self._link = _Link()
        self._tensors: Tensors = _Leave.apply(self._link, settle, len(tensors), *tensors, *saved)

    @untraced
    def arrive(
        self, flight: Transfer[Tensors], saved: Sequence[Tensor], send: Callable[[Tensors, Tensors], Transfer[Tensors]]
    ) -> Tensors:
        """Await what was sent.

        Args:
            flight: on its way; integers among what arrives have no gradient.
            saved: what ``send`` needs, as above.
            send: (gradients of what arrived, ``saved``) -> what comes back, on its way. Called in the backward.
        """
        arrived: Tensors = _Arrive.apply(self._link, send, flight, len(self._tensors), *self._tensors, *saved)
        return arrived


class _Link:
    """What both functions share; no more, because it lives as long as the graph."""

    __slots__ = ("back",)

    def __init__(self) -> None:
        self.back: Transfer[Tensors] | None = None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, settle: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.link, ctx.settle = link, settle
        ctx.dtypes = [tensor.dtype for tensor in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_placeholders: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a recomputed tensor can be unpacked only once
        flight, ctx.link.back = ctx.link.back, None
        grads = ctx.settle(flight.wait(), saved)
        typed = [grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, *typed, *(None for _ in saved)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, send: Any, flight: Transfer[Tensors], count: int, *tensors: Tensor) -> Tensors:
        ctx.link, ctx.send = link, send
        ctx.placeholders = [(tensor.shape, tensor.dtype) for tensor in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        arrived = flight.wait()
        ctx.mark_non_differentiable(*(tensor for tensor in arrived if not tensor.is_floating_point()))
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = tuple(grad for grad in grads if grad.is_floating_point())
        ctx.link.back = ctx.send(wanted, saved)
        nothing = wanted[0].new_zeros(())  # expanded, it takes no memory
        empty = [nothing.to(dtype).expand(shape) for shape, dtype in ctx.placeholders]
        return None, None, None, None, *empty, *(None for _ in saved)
