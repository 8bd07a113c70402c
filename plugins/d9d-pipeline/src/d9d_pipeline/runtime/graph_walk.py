"""Division of an autograd graph into nodes for input gradients and nodes for deferred weight gradients only.

A *late* parameter is one whose gradient is deferred. A node is *on the way* if it is needed for gradients due in the
input phase: gradients of inputs, and of all parameters that are not late. A *branching* node is on the way and also has
children that lead to late parameters only. The subgraph of such children, a *late side*, is reached through branching
nodes, or begins at an output itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


@dataclass
class LateSide:
    """Part of an autograd graph that leads only to late parameters, whose gradients are deferred.

    No two late sides share a node.

    Attributes:
        branching: nodes outside of this part that have child nodes in it; the input phase computes the gradients that
            flow from these nodes into this part.
        roots: indices of the roots of the backward that are in this part.
        parameters: late parameters to which this part leads.
    """

    branching: list[Node] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class DividedGraph:
    """Division of an autograd graph for a backward in two phases.

    Attributes:
        due: leaf tensors with gradients due in the input phase.
        at_once: leaf tensors in ``due`` that the caller wanted to defer, but whose gradients are computed by a custom
            Function, or flow through one.
        sides: late sides, approximately in the order in which a backward reaches them.
    """

    due: Sequence[Tensor]
    at_once: Sequence[Tensor]
    sides: Sequence[LateSide]


def divide_graph(roots: Sequence[GradientEdge], is_candidate: Callable[[Tensor], bool]) -> DividedGraph:
    """Divide the autograd graph of ``roots`` for a split backward, by a walk over its nodes.

    All gradients behind a custom autograd Function are due in the input phase. Such a function computes all of its
    gradients at once, so deferring some would compute everything twice. It may also have effects that must happen in
    the input phase, such as adding a loss or deferring gradients itself.

    Args:
        roots: edges at which the backward starts.
        is_candidate: function that tells whether the gradient of a leaf tensor may be deferred.
    """
    nodes = _successors_first([edge.node for edge in roots])
    leaves = {node: node.variable for node in nodes if _is_leaf(node)}  # type: ignore[attr-defined]
    candidates = {node for node, leaf in leaves.items() if is_candidate(leaf)}
    on_the_way = _on_the_way(nodes, candidates)
    behind: set[Node] = set()
    for node in nodes:
        if issubclass(type(node), BackwardCFunction):
            behind |= _below(_late_children(node, on_the_way))
    late = candidates - behind
    on_the_way = _on_the_way(nodes, late)
    at_once = [leaves[node] for node in candidates - late]
    return DividedGraph([leaves[n] for n in leaves if n not in late], at_once, _sides(nodes, roots, on_the_way, leaves))


def _sides(
    nodes: Sequence[Node], roots: Sequence[GradientEdge], on_the_way: set[Node], leaves: Mapping[Node, Tensor]
) -> list[LateSide]:
    found = _Sides(leaves)
    for index, edge in enumerate(roots):
        if edge.node not in on_the_way:
            found.side_with(_below([edge.node])).roots.append(index)
    for node in reversed(nodes):  # in the order of a backward
        if node in on_the_way and (children := _late_children(node, on_the_way)):
            found.side_with(_below(children)).branching.append(node)
    return [side for side in found.sides.values() if side.parameters]


class _Sides:
    """Late sides; sides that share a node are merged."""

    def __init__(self, leaves: Mapping[Node, Tensor]) -> None:
        self.sides: dict[int, LateSide] = {}
        self._leaves = leaves
        self._side_of: dict[Node, int] = {}
        self._numbers = count()

    def side_with(self, nodes: set[Node]) -> LateSide:
        """Late side that contains ``nodes``, merged from all sides that contain one of these nodes."""
        known = {node for node in nodes if node in self._side_of}
        side, number = LateSide(), next(self._numbers)
        for old in sorted({self._side_of[node] for node in known}):
            other = self.sides.pop(old)
            side.branching += other.branching
            side.roots += other.roots
            side.parameters += other.parameters
            self._side_of.update((node, number) for node, owner in self._side_of.items() if owner == old)
        side.parameters += [self._leaves[node] for node in nodes - known if node in self._leaves]
        self._side_of.update(dict.fromkeys(nodes, number))
        self.sides[number] = side
        return side


def _is_leaf(node: Node) -> bool:
    return not node.next_functions and hasattr(node, "variable")


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _late_children(node: Node, on_the_way: set[Node]) -> list[Node]:
    return [child for child in _children(node) if child not in on_the_way]


def _on_the_way(nodes: Sequence[Node], late: set[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in nodes:
        if (_is_leaf(node) and node not in late) or any(child in found for child in _children(node)):
            found.add(node)
    return found


def _below(starts: Sequence[Node]) -> set[Node]:
    return set(_successors_first(starts))


def _successors_first(starts: Sequence[Node]) -> list[Node]:
    """All nodes reachable from ``starts``, including them; each node comes after its successors."""
    order: list[Node] = []
    seen: set[Node] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        path = [(start, _children(start))]
        while path:
            node, children = path[-1]
            child = next(children, None)
            if child is None:
                order.append(node)
                path.pop()
            elif child not in seen:
                seen.add(child)
                path.append((child, _children(child)))
    return order
