"""Split backward of a stage: input gradients first, weight gradients at any later time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from d9d_core.deferral import Deferral, DeferredWeights
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from d9d_pipeline.runtime.foreign_weights import ForeignWeights
from d9d_pipeline.runtime.graph_walk import LateSide, divide_graph

Roots = Sequence[GradientEdge | Tensor]


class WeightPhase:
    """Weight phase of a split backward: the work deferred by its input phase.

    Args:
        deferred: weight gradients deferred by ops.
        sides: functions of the graph walk, one per late side.
        foreign: foreign weights for which these functions compute gradients.
    """

    def __init__(
        self,
        deferred: DeferredWeights,
        sides: list[Callable[[], None]] | None = None,
        foreign: ForeignWeights | None = None,
    ) -> None:
        self._deferred = deferred
        self._sides = sides or []
        self._foreign = foreign

    def run(self) -> None:
        """Run the weight phase, once. Afterwards ``.grad`` of all parameters is the same as after a whole backward."""
        self._deferred.run()
        if self._foreign is not None:
            with self._foreign.unsharded():
                while self._sides:
                    self._sides.pop(0)()
        self._foreign = None


class SplitBackward:
    """Backward of one stage: at once, or in an input phase and a later weight phase.

    Modules with the trait ``DefersWeights`` defer the gradients of their weights themselves: the graph is freed in the
    input phase, and only the inputs of ops and the gradients of their outputs are kept. If a large enough fraction of
    the stage's matrices belongs to other ("foreign") modules, a walk over the graph defers their gradients too. Then
    the graph and its saved tensors are kept as well, and for a weight that is used several times, the path between its
    uses is computed twice.

    Gradients that are not matrix products, such as of biases, norms, embeddings and of weights used by a custom
    autograd Function, are computed in the input phase. So are all gradients of foreign modules if no input needs a
    gradient, as in the first stage.

    Args:
        stage: stage after all strategies were applied.
        whole: names of modules whose whole backward runs in the input phase, such as compiled blocks, or checkpointed
            blocks, which would be recomputed twice.
    """

    def __init__(self, stage: nn.Module, whole: Collection[str] = ()) -> None:
        self._deferral = Deferral()
        self._foreign = ForeignWeights(stage, self._deferral, whole)

    def expect(self, split: bool) -> None:
        """Set whether ops defer weight gradients, until the next call of this method."""
        self._deferral.wanted = split

    def backward(self, roots: Roots, gradients: Sequence[Tensor | None]) -> None:
        """Run a whole backward.

        Args:
            roots: tensors or edges at which the backward starts; roots that need no gradient are skipped.
            gradients: gradients of the roots; ``None`` for a root with one element.
        """
        edges, seeds = _edges(roots, gradients)
        if edges:
            torch.autograd.backward(edges, seeds)

    def inputs(self, roots: Roots, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> WeightPhase:
        """Run the input phase. Afterwards ``.grad`` of the leaves is the same as after a whole backward.

        Args:
            roots: tensors or edges at which the backward starts; roots that need no gradient are skipped.
            gradients: gradients of the roots; ``None`` for a root with one element.
            leaves: inputs of the stage.

        Returns:
            The weight phase. It must run before parameters change.
        """
        edges, seeds = _edges(roots, gradients)
        with self._deferral.collect() as deferred:
            if not edges:
                return WeightPhase(deferred)
            if not self._foreign.worthwhile or not any(leaf.requires_grad for leaf in leaves):
                torch.autograd.backward(edges, seeds)
                return WeightPhase(deferred)
            return self._walk(edges, seeds, leaves, deferred)

    def _walk(
        self,
        edges: list[GradientEdge],
        seeds: list[Tensor | None],
        leaves: Sequence[Tensor],
        deferred: DeferredWeights,
    ) -> WeightPhase:
        inputs = {id(leaf) for leaf in leaves}
        found = divide_graph(edges, lambda leaf: id(leaf) not in inputs and self._foreign.is_late(leaf))
        self._foreign.at_once(found.at_once)
        if not found.sides:
            torch.autograd.backward(edges, seeds)
            return WeightPhase(deferred)
        apart = {index for side in found.sides for index in side.roots}
        sides = [_Side(side, edges, seeds, self._deferral) for side in found.sides]
        handles = [handle for side in sides for handle in side.watch()]
        try:
            due = [index for index in range(len(edges)) if index not in apart]
            if due:
                torch.autograd.backward(
                    [edges[i] for i in due], [seeds[i] for i in due], retain_graph=True, inputs=list(found.due)
                )
        finally:
            for handle in handles:
                handle.remove()
        return WeightPhase(deferred, [side.run for side in sides], self._foreign)


class _Side:
    """Part of the graph that leads only to deferred weight gradients, with the gradients that arrive at it.

    Args:
        side: nodes and late parameters.
        roots: roots of the whole graph; only the roots of this side are kept.
        seeds: gradients of the roots.
        deferral: deferral of the stage.
    """

    def __init__(
        self, side: LateSide, roots: list[GradientEdge], seeds: list[Tensor | None], deferral: Deferral
    ) -> None:
        self._side = side
        self._seeds = [(roots[index], seeds[index]) for index in side.roots]
        self._deferral = deferral
        self._arrived: dict[int, tuple[Tensor | None, ...]] = {}

    def watch(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Make the next backward record the gradients that arrive at the branching nodes."""
        return [node.register_prehook(self._noting(index)) for index, node in enumerate(self._side.branching)]

    def run(self) -> None:
        """Compute gradients of the late parameters, from roots and branching nodes of this side; see ``LateSide``."""
        nodes = self._side.branching
        starts: list[GradientEdge] = [edge for edge, _ in self._seeds]
        gradients = [gradient for _, gradient in self._seeds]
        for index, arrived in self._arrived.items():
            for output, gradient in enumerate(arrived):
                if gradient is not None:
                    starts.append(GradientEdge(nodes[index], output))
                    gradients.append(gradient)
        # A branching node may lead to another one, so part of the other's gradient arrives again. The hooks replace the
        # sum by the recorded gradient, which already includes this part.
        handles = [nodes[index].register_prehook(self._replacing(index)) for index in self._arrived]
        try:
            if starts:
                with self._deferral.ignore():
                    # retain_graph: nodes of other sides may lie between two branching nodes, and need their tensors.
                    torch.autograd.backward(starts, gradients, retain_graph=True, inputs=self._side.parameters)
        finally:
            for handle in handles:
                handle.remove()

    def _noting(self, index: int) -> Callable[[Sequence[Tensor | None]], None]:
        def note(gradients: Sequence[Tensor | None]) -> None:
            self._arrived[index] = tuple(gradients)

        return note

    def _replacing(self, index: int) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...]]:
        return lambda _gradients: self._arrived[index]


def _edges(roots: Roots, gradients: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor | None]]:
    pairs = [
        (get_gradient_edge(root) if isinstance(root, Tensor) else root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if not isinstance(root, Tensor) or root.requires_grad
    ]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
