"""Builder of a rank's order of computation; counts the microbatches of each stage."""

from __future__ import annotations

from collections import Counter, deque

from d9d_core.schedule import Action, Backward, Forward, InputBackward, MicrobatchAction, Overlap, WeightBackward


class OrderBuilder:
    """Builder of a rank's order of computation; each call appends an action for the next microbatch of a stage.

    Args:
        limit: number of microbatches; actions of later microbatches are counted but not appended.

    Attributes:
        actions: actions appended so far.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.actions: list[Action] = []
        self._counts: Counter[tuple[type[Action], int]] = Counter()
        self._open: deque[tuple[int, int]] = deque()

    def count(self, kind: type[Action], stage: int) -> int:
        """Number of actions of this kind on the stage; a whole backward counts as an input and a weight backward."""
        return self._counts[kind, stage]

    def forward(self, stage: int) -> None:
        self._add(Forward, stage, self._next(Forward, stage))

    def backward(self, stage: int) -> None:
        """Append a whole backward of the stage."""
        self._add(Backward, stage, self._next_backward(stage))

    def both_halves(self, stage: int) -> None:
        """Append both halves of a backward, so that input gradients are sent before weight gradients are computed."""
        self._add(InputBackward, stage, self._next(InputBackward, stage))
        self._add(WeightBackward, stage, self._next(WeightBackward, stage))

    def overlap(self, forward: int, backward: int) -> None:
        """Append an overlapped pair of a forward of one stage and a whole backward of another."""
        ahead = Forward(forward, self._next(Forward, forward))
        self.actions.append(Overlap(ahead, Backward(backward, self._next_backward(backward))))

    def input_backward(self, stage: int) -> None:
        """Append the input gradients of the stage; a later :meth:`weight_backward` appends the weight gradients."""
        microbatch = self._next(InputBackward, stage)
        self._add(InputBackward, stage, microbatch)
        self._open.append((stage, microbatch))

    def weight_backward(self) -> None:
        """Append the weight gradients, of any stage, that have been deferred longest; do nothing if there are none."""
        if self._open:
            self._weights(*self._open.popleft())

    def weight_backward_of(self, stage: int) -> None:
        """Append the weight gradients of this stage that have been deferred longest."""
        unit = next(unit for unit in self._open if unit[0] == stage)
        self._open.remove(unit)
        self._weights(*unit)

    @property
    def open(self) -> int:
        """Number of deferred weight gradients."""
        return len(self._open)

    def _next_backward(self, stage: int) -> int:
        self._next(WeightBackward, stage)
        return self._next(InputBackward, stage)

    def _weights(self, stage: int, microbatch: int) -> None:
        self._next(WeightBackward, stage)
        self._add(WeightBackward, stage, microbatch)

    def _add(self, kind: type[MicrobatchAction], stage: int, microbatch: int) -> None:
        if microbatch < self._limit:
            self.actions.append(kind(stage, microbatch))

    def _next(self, kind: type[MicrobatchAction], stage: int) -> int:
        self._counts[kind, stage] += 1
        return self._counts[kind, stage] - 1
