"""Slots of ops that stand for the lines of a method, such as a whole feed-forward layer.

The method reads like PyTorch, and is the reference. A kernel in its place reads the weights of the layers that the
method calls; so it may compute only where the layers do nothing besides, and gets its arguments as autocast casts them.
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
    """Slot of an op for a whole method of a module, in the place of its lines; see :func:`in_one_op`.

    Args:
        op, reference, facts: see :class:`~d9d_core.kernel.OpSlot`.
        arguments: module and inputs of the method -> arguments of the op.
        fits: module -> whether a backend computes what the lines would at this call.
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
    """Let a backend compute what a method computes, where one is bound and fits; else the method's lines are run.

    Args:
        name: attribute of the module that holds the :class:`WholeSlot`.
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
