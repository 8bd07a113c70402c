"""Activations that are held while a pipeline rank runs its program. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from d9d_core.schedule import Backward, Forward, InputBackward, Program, WeightBackward, compute_parts


class Moment(NamedTuple):
    """Moment at which a backward begins.

    Attributes:
        held: stage and the number of its microbatches whose activations are held, this one included.
        stage: whose backward it is.
        graded: stages that have gradients already.
    """

    held: tuple[tuple[int, int], ...]
    stage: int
    graded: frozenset[int]


def moments(program: Program) -> list[Moment]:
    """Live activations of a program: moments when backwards begin, without any where another holds as much or more.

    Activations are held up to the end of their backward, or of its weight gradients where those come apart.
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
    """Whether as much is held at one moment as at another, and backwards of the same stage begin."""
    held = dict(one.held)
    return (
        one.stage == other.stage
        and one.graded >= other.graded
        and all(held.get(stage, 0) >= count for stage, count in other.held)
    )
