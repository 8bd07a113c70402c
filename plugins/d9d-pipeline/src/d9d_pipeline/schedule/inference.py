"""Schedule of an evaluation: forwards only."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Forward, Program

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import Placement
from d9d_pipeline.schedule.units import check, depth_first, rounds


def inference(placement: Placement, microbatches: int) -> Sequence[Program]:
    """Run all microbatches forward, on the stages of a training schedule.

    Rounds of as many microbatches as there are ranks pass through the stages of a rank one after another.

    Args:
        placement: stages of each rank, as ``d9d_core.program.validation.placement`` derives them from programs.
        microbatches: number of microbatches.
    """
    check("inference", len(placement), microbatches)
    groups = rounds(microbatches, len(placement))
    orders = [[Forward(*unit) for unit in depth_first(stages, groups)] for stages in placement]
    return insert_transfers(orders, placement)
