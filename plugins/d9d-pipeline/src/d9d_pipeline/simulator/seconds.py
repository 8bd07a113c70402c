"""Simulated seconds of a step, for planners."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.cost import StageTimes
from d9d_core.schedule import Program

from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.run import timed


def seconds(programs: Sequence[Program], times: StageTimes) -> float:
    """Simulated time of a step, from the first to the last action of any rank. Overlapped pairs hide nothing.

    Raises:
        BuildError: the programs are invalid or deadlock.
        ValueError: times are given for another number of stages.
    """
    costs = Costs(forward=times.forward, backward=times.backward, weight=times.weight, transfer=times.transfer)
    return max(timed(programs, costs).ends, default=0.0)
