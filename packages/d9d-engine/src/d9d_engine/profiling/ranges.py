"""Profiler ranges around the phases and actions of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from d9d_core.schedule import Action, MicrobatchAction, compute_parts
from torch.profiler import record_function

#: Prefix of the names of d9d's ranges.
PREFIX = "d9d/"
OPTIMIZER = "optimizer"
_NOTHING = nullcontext()


class Ranges:
    """Profiler ranges around named phases. If ``on`` is false, a range costs one call and an empty block.

    Attributes:
        on: whether a profiler records.
    """

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that opens a profiler range for a phase."""
        return record_function(PREFIX + name) if self.on else _NOTHING


def name_of(action: Action) -> str:
    """Name of an action's range: ``Forward stage 1 microbatch 0``."""
    return " + ".join(
        f"{type(part).__name__} stage {part.stage}"
        + (f" microbatch {part.microbatch}" if isinstance(part, MicrobatchAction) else "")
        for part in compute_parts(action)
    )
