"""Deferral of weight gradients: they are computed later than the gradients of inputs.

A pipeline can send a gradient on as soon as that of a stage's inputs is known, and fill waiting times with those of its
weights (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). An op takes part by handing the gradient of its
weight to a :class:`Deferral`, which computes it at once or later. Nothing is patched: an op without a deferral leaves
everything to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["Deferral", "DeferredWeights"]

_Item = tuple[GradientEdge, Callable[[], Tensor]]
#: Bytes of gradients that may exist at once before they are added to those of the parameters.
_TOGETHER = 32 * 2**20


class DeferredWeights:
    """Weight gradients that one backward deferred: computed once, at any later time.

    Inputs of the ops and gradients of their outputs stay alive until then, and nothing else does.
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

        Autograd takes it from the op's weight to the parameters, so casts, concatenations and hooks on the way count. A
        parameter with several contributions gets them as one, as in an unsplit backward. Memory is freed weight by
        weight, small ones together.
        """
        groups = _by_parameter(self._items)
        self._items = []
        while groups:
            _run(groups)


class Deferral:
    """Collector of the weight gradients that the ops of one pipeline stage defer.

    Modules get it with the trait :class:`d9d_core.traits.DefersWeights` and hand it to their ops.

    For autograd, such an op has no weight: it gets a detached one. Were there an edge to it, autograd would follow it
    with zeros or nothing, and free what the later gradient needs on its way.

    Attributes:
        wanted: whether the backward of what runs forward now is going to be collected. If not, an op had better leave
            its weight to autograd, which takes less of the host's time.
    """

    def __init__(self) -> None:
        self.wanted = True
        self._left: DeferredWeights | None = None
        self._ignoring = False

    def add(self, weight: GradientEdge, compute: Callable[[], Tensor]) -> None:
        """Defer a weight gradient. Called by ops in their backward, in whichever thread autograd runs it.

        It is computed now, and added to the parameters' gradients by a backward of its own, unless backwards are being
        collected.

        Args:
            weight: of the op's weight, taken in its forward (:func:`torch.autograd.graph.get_gradient_edge`).
            compute: returns the gradient, in shape and dtype of the weight. Called without a graph being recorded. It
                holds detached tensors only, or it would keep the graph alive.
        """
        if self._ignoring:
            return
        if self._left is None:
            _run([[(weight, compute)]])
        else:
            self._left.add(weight, compute)

    @contextmanager
    def collect(self) -> Iterator[DeferredWeights]:
        """Collect the weight gradients of the backwards inside the block in the result."""
        self._left = left = DeferredWeights()
        try:
            yield left
        finally:
            self._left = None

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Leave out the weight gradients of backwards inside the block: another one has deferred them already."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False


def _run(groups: list[list[_Item]]) -> None:
    """Compute the first groups and add them; frees each item as soon as it is computed.

    Each call of autograd takes the host 9 us, whatever the size of the gradients, so these wait for
    each other up to :data:`_TOGETHER`.
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
    # Several may share nodes on the way to parameters; what is retained goes with the edges.
    torch.autograd.backward(edges, gradients, retain_graph=True)


def _by_parameter(items: Sequence[_Item]) -> list[list[_Item]]:
    """Groups of items; those that reach a common parameter are in one."""
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
