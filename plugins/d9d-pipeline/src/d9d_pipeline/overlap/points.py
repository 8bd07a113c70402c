"""Where a forward and a backward hand over, and how a model gets these points.

Points cost a look at an attribute where no pair runs. None lies inside a graph that ``torch.compile`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from d9d_pipeline.overlap.baton import Baton, Side

Remove = Callable[[], None]


class Points:
    """Everything that may hand over, of all stages of a rank.

    Attributes:
        baton: of the pair that runs.
    """

    def __init__(self) -> None:
        self.baton: Baton | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self) -> None:
        """A forward is here."""
        if self.baton is not None:
            self.baton.hand_over(Side.FORWARD)

    def backward(self, _grad: Tensor) -> None:
        """A backward is here: a hook of a tensor."""
        if self.baton is not None:
            self.baton.hand_over(Side.BACKWARD)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watched(self, tensor: Tensor) -> Tensor:
        """The same, handing over once the backward knows the gradient of this use of it."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        use = tensor.view_as(tensor)
        use.register_hook(self.backward)  # type: ignore[no-untyped-call]
        return use


class Entrance:
    """Hands over where a forward enters a block, and where a backward leaves it.

    Args:
        points: of the rank.
        forward: whether a forward hands over too. One that hands over inside of the block does not, so that both
            directions have equally many points: then each finds the other at the part that goes with its own.
    """

    def __init__(self, points: Points, *, forward: bool) -> None:
        self._points = points
        self._forward = forward

    def __call__(self, _block: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook."""
        if self._forward:
            self._points.forward()
        if torch.is_grad_enabled():
            entering = next(filter(_has_gradient, (*args, *kwargs.values())), None)
            if entering is not None:
                entering.register_hook(self._points.backward)


def _has_gradient(value: object) -> bool:
    # A parameter would collect a hook from each microbatch, for ever.
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


class Compiled:
    """Takes the place of a block's compiled call, which has the block's hooks inside.

    Args:
        entrance: called before it.
        call: the compiled call.
    """

    def __init__(self, entrance: Entrance, call: Callable[..., Any]) -> None:
        self._entrance = entrance
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        self._entrance(None, args, kwargs)
        return self._call(*args, **kwargs)


def add_entrance(block: nn.Module, entrance: Entrance) -> Remove:
    """Have ``entrance`` called before everything else when the block is called: FSDP2's and all other hooks.

    So in the backward it comes after them, when FSDP2 has begun to reduce the block's gradients. In place.

    Returns:
        What takes it away again.
    """
    call = block._compiled_call_impl  # noqa: SLF001 - what nn.Module.compile leaves; not public, a test pins it
    if call is None:
        return block.register_forward_pre_hook(entrance, prepend=True, with_kwargs=True).remove
    block._compiled_call_impl = Compiled(entrance, call)  # noqa: SLF001

    def remove() -> None:
        block._compiled_call_impl = call  # noqa: SLF001

    return remove
