"""Deferral of weight gradients: ops compute them later than input gradients.

A pipeline stage can send the gradient of its inputs as soon as it is known, and compute weight gradients in idle times
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). An op takes part by passing a function that computes
its weight gradient to a :class:`Deferral`, which calls the function at once or later. Torch is not patched: an op
without a deferral leaves all gradients to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["Deferral", "DeferredWeights"]

_Item = tuple[GradientEdge, Callable[[], Tensor]]
#: Weight gradients are computed until they have this many bytes; then one autograd call adds them to the parameters'
#: gradients.
_TOGETHER = 32 * 2**20


class DeferredWeights:
    """Weight gradients deferred by one backward: computed once, at any later time.

    Only the ops' inputs and the gradients of their outputs are kept alive until then.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, weight: GradientEdge, compute: Callable[[], Tensor]) -> None:
        """Defer one weight gradient; see :meth:`Deferral.add`."""
        self._items.append((weight, compute))

    def run(self) -> None:
        """Compute the deferred gradients, in the order of the backward, and add them to the parameters' gradients.

        Autograd propagates each gradient from the op's weight to the parameters, through casts, concatenations and
        hooks. A parameter with several contributions receives their sum at once, as in an unsplit backward. Memory is
        freed weight by weight; small weights are processed together.
        """
        groups = _by_parameter(self._items)
        self._items = []
        while groups:
            _run(groups)


class Deferral:
    """Collector of the weight gradients that the ops of one pipeline stage defer.

    Modules receive it through the trait :class:`d9d_core.traits.DefersWeights` and pass it to their ops.

    An op that defers receives a detached weight. If the weight were attached to the graph, autograd would propagate to
    it in the first backward and free tensors that the later weight gradient needs.

    Attributes:
        wanted: whether weight gradients of the current forward's backward will be collected. If false, an op should
            leave its weight to autograd, which costs less host time.
    """

    def __init__(self) -> None:
        self.wanted = True
        self._left: DeferredWeights | None = None
        self._ignoring = False

    def add(self, weight: GradientEdge, compute: Callable[[], Tensor]) -> None:
        """Defer a weight gradient. Called by ops in their backward, in any autograd thread.

        Outside of :meth:`collect`, the gradient is computed at once, and a separate backward adds it to the parameters'
        gradients.

        Args:
            weight: gradient edge of the op's weight, taken in its forward
                (:func:`torch.autograd.graph.get_gradient_edge`).
            compute: returns the gradient, in shape and dtype of the weight. Called in no-grad mode. It must hold
                detached tensors only, or it would keep the graph alive.
        """
        if self._ignoring:
            return
        if self._left is None:
            _run([[(weight, compute)]])
        else:
            self._left.add(weight, compute)

    @contextmanager
    def collect(self) -> Iterator[DeferredWeights]:
        """Collect the weight gradients that ops defer in backwards inside the block."""
        self._left = left = DeferredWeights()
        try:
            yield left
        finally:
            self._left = None

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Discard the weight gradients of backwards inside the block, because another backward has deferred them."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False


def _run(groups: list[list[_Item]]) -> None:
    """Compute the weight gradients of the first groups and backpropagate them; pop each item when it is computed.

    Each autograd call costs 9 us of host time for any size of gradients, so groups are batched up to
    :data:`_TOGETHER` bytes.
    """
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    size = 0
    with torch.no_grad():
        while groups and size < _TOGETHER:
            group = groups.pop(0)
            while group:
                edge, compute = group.pop(0)
                edges.append(edge)
                gradients.append(compute())
                size += gradients[-1].nbytes
                del compute  # it holds the item's tensors
    # Groups may share graph nodes on the way to parameters, so the graph is retained; it is freed with the edges.
    torch.autograd.backward(edges, gradients, retain_graph=True)


def _by_parameter(items: Sequence[_Item]) -> list[list[_Item]]:
    """Group deferred weight gradients; gradients that contribute to a common parameter are in one group."""
    groups: dict[int, list[_Item]] = {}
    group_of: dict[Node, int] = {}
    for index, item in enumerate(items):
        nodes = _reached(item[0].node)
        groups[index] = []
        for other in sorted({group_of[node] for node in nodes if node in group_of}):
            groups[index] += groups.pop(other)
            group_of.update((node, index) for node, group in group_of.items() if group == other)
        groups[index].append(item)
        group_of.update(dict.fromkeys(nodes, index))
    return list(groups.values())


def _reached(start: Node) -> set[Node]:
    nodes, waiting = {start}, [start]
    while waiting:
        found = {node for node, _ in waiting.pop().next_functions if node is not None} - nodes
        nodes |= found
        waiting += found
    return nodes
