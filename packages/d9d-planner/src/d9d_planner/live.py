"""Number of microbatches whose activations a pipeline rank holds during its program. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from d9d_core.schedule import Backward, Forward, InputBackward, Program, WeightBackward, compute_parts


class Moment(NamedTuple):
    """State of a pipeline rank when a backward begins.

    Attributes:
        held: (stage, number of microbatches with held activations) pairs, including the current microbatch.
        stage: stage of the backward.
        graded: stages of this rank whose gradients are already allocated, from earlier microbatches.
    """

    held: tuple[tuple[int, int], ...]
    stage: int
    graded: frozenset[int]


def moments(program: Program) -> list[Moment]:
    """States of a rank at the start of its backwards; states that need no more memory than another one are left out.

    Activations are held until the end of their backward, or of the weight gradients of a split backward.
    """
    held: dict[int, int] = {}
    graded: set[int] = set()
    found: dict[Moment, None] = {}
    for action in program:
        released: list[int] = []
        for part in compute_parts(action):
            if isinstance(part, Forward):
                held[part.stage] = held.get(part.stage, 0) + 1
        for part in compute_parts(action):
            if isinstance(part, Backward | InputBackward):
                found[Moment(tuple(sorted(held.items())), part.stage, frozenset(graded))] = None
            if isinstance(part, Backward | WeightBackward):
                released.append(part.stage)
        for stage in released:
            held[stage] -= 1
            graded.add(stage)
    return [moment for moment in found if not any(_covers(other, moment) for other in found if other is not moment)]


def _covers(one: Moment, other: Moment) -> bool:
    """Whether ``one`` holds all activations and gradients that ``other`` holds, in a backward of the same stage."""
    held = dict(one.held)
    return (
        one.stage == other.stage
        and one.graded >= other.graded
        and all(held.get(stage, 0) >= count for stage, count in other.held)
    )
