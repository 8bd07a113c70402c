"""Slots of ops that replace a whole method, such as a feed-forward layer.

The method is plain PyTorch, and serves as the reference. A kernel that replaces it reads the weights of the layers that
the method calls. The kernel therefore runs only if these layers do nothing but multiply by their weights, and gets its
arguments already cast by autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from d9d_core.kernel import OpSlot
from torch import nn

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


class WholeSlot(OpSlot):
    """Slot of an op that replaces a whole method of a module; :func:`in_one_op` decorates the method.

    Args:
        op: name of the op.
        reference: PyTorch reference of the op, which runs on every device.
        facts: other arguments of :class:`~d9d_core.kernel.OpSlot`.
        arguments: function of the module and the inputs of the method that returns the arguments of the op.
        fits: function of the module that returns whether a backend computes the same as the method in this call.
    """

    def __init__(
        self,
        op: str,
        reference: Callable[..., Any],
        *,
        arguments: Callable[..., tuple[Any, ...]],
        fits: Callable[[Any], bool] = lambda _: True,
        **facts: Any,
    ) -> None:
        super().__init__(op, reference, **facts)
        self.arguments, self.fits = arguments, fits


def in_one_op(name: str) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """Decorate a method so that it calls the bound backend instead, if a backend is bound and fits the call.

    Args:
        name: attribute of the module with the :class:`WholeSlot`.
    """

    def decorate(lines: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        @wraps(lines)
        def method(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            slot = getattr(self, name)
            if slot.backend != "reference" and slot.fits(self):
                return cast("R", slot(*slot.arguments(self, *args, **kwargs)))
            return lines(self, *args, **kwargs)

        return method

    return decorate
