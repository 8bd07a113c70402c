"""Forwards only, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.extend import Forward, Program

from d9d_pipeline.communication import connect
from d9d_pipeline.placement import Placement
from d9d_pipeline.schedule.units import check, depth_first, rounds


def inference(placement: Placement, microbatches: int) -> Sequence[Program]:
    """Run all microbatches forward, where a schedule for training has put the stages.

    A round of as many microbatches as there are ranks passes through one stage of a rank after the other.

    Args:
        placement: which rank has which stages, as ``d9d_core.program.validation.placement`` reads it off programs.
        microbatches: how many.
    """
    check("inference", len(placement), microbatches)
    groups = rounds(microbatches, len(placement))
    orders = [[Forward(*unit) for unit in depth_first(stages, groups)] for stages in placement]
    return connect(orders, placement)
