"""Text form of programs: printing, parsing, comparison. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Overlap,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    WeightBackward,
)

__all__ = ["diff_programs", "format_programs", "parse_programs"]

_TYPES: tuple[type[MicrobatchAction], ...] = (
    Forward,
    Backward,
    InputBackward,
    WeightBackward,
    SendActivation,
    ReceiveActivation,
    SendGradient,
    ReceiveGradient,
)
_MARKS = {kind.mark: kind for kind in _TYPES}
_ACTION = re.compile(r"([A-Z][<>]?)(\d+)(?:\.(\d+))?")


def format_programs(programs: Sequence[Program]) -> str:
    """Print programs, one line per rank: ``F0.0 S>0.0 R<0.0 B0.0 R0``."""
    return "\n".join(" ".join(map(str, program)) for program in programs)


def parse_programs(text: str) -> list[Program]:
    """Parse the output of :func:`format_programs`.

    Raises:
        ValueError: a word is not an action; the message quotes the word.
    """
    return [tuple(map(parse_action, line.split())) for line in text.splitlines()]


def parse_action(text: str) -> Action:
    """Parse an action: ``F0.3``, or ``F0.3+B7.1`` for an overlapped pair.

    Raises:
        ValueError: the text is not an action.
    """
    if "+" in text:
        forward, backward = map(parse_action, text.split("+", 1))
        if isinstance(forward, Forward) and isinstance(backward, Backward | InputBackward):
            return Overlap(forward, backward)
        raise ValueError(f"'{text}' is not an overlapped pair of a forward and a backward, such as F0.3+B7.1")
    match = _ACTION.fullmatch(text)
    if match and match[3] is None and match[1] == "R":
        return Reduce(int(match[2]))
    if match and match[3] is not None and match[1] in _MARKS:
        return _MARKS[match[1]](int(match[2]), int(match[3]))
    known = " ".join(f"{mark}0.3" for mark in _MARKS)
    raise ValueError(f"'{text}' is not an action; actions of stage 0 and microbatch 3 are {known} R0")


def diff_programs(left: Sequence[Program], right: Sequence[Program]) -> list[str]:
    """Differences between two lists of programs, one line each: rank, position, left actions, right actions."""
    lines = []
    for rank in range(max(len(left), len(right))):
        if rank >= min(len(left), len(right)):
            lines.append(f"rank {rank}: only on the {'left' if rank < len(left) else 'right'}")
            continue
        if left[rank] == right[rank]:
            continue
        a, b = list(map(str, left[rank])), list(map(str, right[rank]))
        for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if tag != "equal":
                old, new = (" ".join(words) or "nothing" for words in (a[a0:a1], b[b0:b1]))
                lines.append(f"rank {rank}, position {a0}: {old} became {new}")
    return lines
