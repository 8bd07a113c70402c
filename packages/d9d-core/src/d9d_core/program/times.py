"""Times of pipeline stages, from which schedules are simulated. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from d9d_core.program.actions import Program


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of the stages of a pipeline for one microbatch, in seconds.

    Attributes:
        forward, backward: stage -> time; the backward is a whole one.
        weight: stage -> the part of the backward that weight gradients take.
        transfer: time of one tensor from one rank to another.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0


#: Signature of :attr:`d9d_core.plugin.ScheduleSpec.simulate`: seconds of a step of the programs of all ranks.
Simulate = Callable[[Sequence[Program], StageTimes], float]
