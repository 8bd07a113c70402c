"""Peak memory of a rank, from the order of its actions alone."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import (
    Backward,
    Forward,
    InputBackward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    WeightBackward,
    compute_parts,
)


def live(program: Program, weights: Sequence[float], training: bool = True) -> float:
    """Peak memory of a simulated step: the most activations held at any time.

    Activations are held from a forward to the end of its backward, or of its weight gradients if the backward is split;
    without training, only during the forward.

    Args:
        program: program of one rank.
        weights: size of the activations of one microbatch, for each stage.
        training: whether there are backwards.
    """
    held = most = 0.0
    for action in program:
        released = 0.0
        for part in compute_parts(action):
            if isinstance(part, Forward):
                held += weights[part.stage]
                released += 0.0 if training else weights[part.stage]
            elif isinstance(part, Backward | WeightBackward):
                released += weights[part.stage]
        most = max(most, held)
        held -= released
    # Round, because sums of fractions such as thirds are not exact.
    return round(most, 9)


def inbox(program: Program) -> int:
    """Largest number of tensors that have a posted receive and that no computation has used yet."""
    offered = most = 0
    waiting = set()
    for action in program:
        if isinstance(action, ReceiveActivation | ReceiveGradient):
            waiting.add((isinstance(action, ReceiveActivation), action.stage, action.microbatch))
            offered += 1
            most = max(most, offered)
            continue
        for part in compute_parts(action):
            if isinstance(part, Forward | Backward | InputBackward):
                key = (isinstance(part, Forward), part.stage, part.microbatch)
                if key in waiting:
                    waiting.remove(key)
                    offered -= 1
    return most
