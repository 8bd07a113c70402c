"""Asynchronous exchange of tensors whose forward and backward both overlap with other computation.

Autograd runs the backwards of functions in the reverse order of their forward calls. An exchange therefore consists of
two autograd functions: the first starts the exchange before the overlapped computation, and the second finishes the
exchange after this computation. In the backward, the second function sends the gradients, and the first function waits
for them. The tensors passed between the two functions have not arrived yet, so placeholders stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from d9d_core.traits import Transfer
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def untraced(function: F) -> F:
    """Exclude a function from ``torch.compile``: the graph breaks there, and the function runs eagerly.

    It is meant for functions that start communication which another function awaits: Dynamo would begin to trace such a
    function and then fail. The decorator imports Dynamo, which takes time.
    """
    opaque: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return opaque


class OutsideGraph:
    """Base of dispatchers whose communication Dynamo cannot trace, see :class:`d9d_core.traits.Dispatcher`."""

    @untraced
    def outside_graph(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function without compiling any of it."""
        return function(*args)


def as_arrived(arrived: Tensors, _saved: Tensors) -> Tensors:
    """Return the received tensors unchanged as gradients."""
    return arrived


class AsyncExchange:
    """Asynchronous exchange of tensors in a dispatch, and of their gradients in the backward.

    Args:
        tensors: tensors that may have gradients.
        saved: tensors that ``to_gradients`` needs. All other objects to which ``to_gradients`` refers must be small,
            and the same when activation checkpointing recomputes the forward.
        to_gradients: function of the tensors received in the backward and of ``saved``: returns the gradients of
            ``tensors``.
    """

    __slots__ = ("_link", "_tensors")

    @untraced  # the backward changes _Link, which cannot be traced
    def __init__(
        self,
        tensors: Sequence[Tensor],
        saved: Sequence[Tensor] = (),
        to_gradients: Callable[[Tensors, Tensors], Tensors] = as_arrived,
    ) -> None:
        self._link = _Link()
        self._tensors: Tensors = _StartExchange.apply(self._link, to_gradients, len(tensors), *tensors, *saved)

    @untraced
    def wait(
        self, pending: Transfer[Tensors], saved: Sequence[Tensor], send: Callable[[Tensors, Tensors], Transfer[Tensors]]
    ) -> Tensors:
        """Wait for the tensors of the exchange.

        Args:
            pending: exchange in progress; received integers have no gradient.
            saved: tensors that ``send`` needs.
            send: function of the gradients of the received tensors and ``saved`` that starts and returns the exchange
                of the gradients. Called in the backward.
        """
        arrived: Tensors = _FinishExchange.apply(self._link, send, pending, len(self._tensors), *self._tensors, *saved)
        return arrived


class _Link:
    """State shared by the two autograd functions of an exchange; small, because it lives as long as the graph."""

    __slots__ = ("back",)

    def __init__(self) -> None:
        self.back: Transfer[Tensors] | None = None


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, to_gradients: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.link, ctx.to_gradients = link, to_gradients
        ctx.dtypes = [tensor.dtype for tensor in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_placeholders: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a recomputed tensor can be unpacked only once
        pending, ctx.link.back = ctx.link.back, None
        grads = ctx.to_gradients(pending.wait(), saved)
        typed = [grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, *typed, *(None for _ in saved)


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, send: Any, pending: Transfer[Tensors], count: int, *tensors: Tensor) -> Tensors:
        ctx.link, ctx.send = link, send
        ctx.placeholders = [(tensor.shape, tensor.dtype) for tensor in tensors[:count]]
        ctx.save_for_backward(*tensors[count:])
        arrived = pending.wait()
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
