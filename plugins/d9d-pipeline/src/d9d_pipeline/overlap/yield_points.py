"""Yield points: points in a model where a forward or a backward lets the other side of its overlapped pair run.

While no pair runs, a yield point costs one attribute access. No yield point is inside a graph of ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from d9d_pipeline.overlap.turns import Side, Turns

Remove = Callable[[], None]


class YieldPoints:
    """Yield points of all stages of a rank.

    Attributes:
        turns: alternation of the running pair; ``None`` if no pair runs.
    """

    def __init__(self) -> None:
        self.turns: Turns | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self) -> None:
        """Yield point of a forward."""
        if self.turns is not None:
            self.turns.yield_turn(Side.FORWARD)

    def backward(self, _grad: Tensor) -> None:
        """Yield point of a backward, as a hook of a tensor."""
        if self.turns is not None:
            self.turns.yield_turn(Side.BACKWARD)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watched(self, tensor: Tensor) -> Tensor:
        """View of a tensor that makes the backward yield once the gradient of the view is computed."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        use = tensor.view_as(tensor)
        use.register_hook(self.backward)  # type: ignore[no-untyped-call]
        return use


class BlockHook:
    """Yield point at a block: a forward pre-hook that yields where a forward enters and where a backward leaves.

    Args:
        points: yield points of the rank.
        forward: whether a forward yields at this block. It does not at blocks with yield points inside, so that forward
            and backward have the same number of yield points, and corresponding parts of both run together.
    """

    def __init__(self, points: YieldPoints, *, forward: bool) -> None:
        self._points = points
        self._forward = forward

    def __call__(self, _block: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Yield if a forward yields at this block, and register a yield for the backward."""
        if self._forward:
            self._points.forward()
        if torch.is_grad_enabled():
            entering = next(filter(_has_gradient, (*args, *kwargs.values())), None)
            if entering is not None:
                entering.register_hook(self._points.backward)


def _has_gradient(value: object) -> bool:
    # Parameters are excluded: they outlive the microbatch, so they would collect its hooks without end.
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


class HookedCompiledCall:
    """Replacement for a block's compiled call, which would run the block's hooks inside the graph.

    Args:
        hook: hook of the block.
        call: compiled call of the block.
    """

    def __init__(self, hook: BlockHook, call: Callable[..., Any]) -> None:
        self._entrance = hook
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook, then the compiled block."""
        self._entrance(None, args, kwargs)
        return self._call(*args, **kwargs)


def add_block_hook(block: nn.Module, hook: BlockHook) -> Remove:
    """Call ``hook`` before all other hooks when the block is called, including FSDP2's. In place.

    In the backward, ``hook`` therefore runs after the other hooks, when FSDP2 has begun to reduce the block's
    gradients.

    Returns:
        Function that removes the hook.
    """
    call = block._compiled_call_impl  # noqa: SLF001 - set by nn.Module.compile; a test pins it
    if call is None:
        return block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove
    block._compiled_call_impl = HookedCompiledCall(hook, call)  # noqa: SLF001

    def remove() -> None:
        block._compiled_call_impl = call  # noqa: SLF001

    return remove
