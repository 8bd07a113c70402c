"""Conversion of schedules of ``torch.distributed.pipelining``, to simulate them under the same rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Overlap,
    Program,
    WeightBackward,
)

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import Placement

_TYPES: Mapping[str, type[MicrobatchAction]] = {
    "F": Forward, "B": Backward, "I": InputBackward, "W": WeightBackward,
}  # fmt: skip


def from_torch(pipeline_order: Mapping[int, Iterable[Any]], placement: Placement) -> list[Program]:
    """Programs with the order of computation of a torch schedule, and transfers inserted by our pass.

    Args:
        pipeline_order: rank -> the ``_Action`` of a schedule, or ``None`` for a pause, which says nothing here.
        placement: stages of each rank.
    """
    return insert_transfers([_translate(pipeline_order[rank]) for rank in range(len(placement))], placement)


def _translate(order: Iterable[Any]) -> list[Action]:
    found: list[Action] = []
    for action in order:
        if action is None:
            continue
        if action.sub_actions:
            forward, backward = _translate(action.sub_actions)
            assert isinstance(forward, Forward)
            assert isinstance(backward, Backward | InputBackward)
            found.append(Overlap(forward, backward))
        elif kind := _TYPES.get(action.computation_type.value):  # the rest is communication and memory
            found.append(kind(action.stage_index, action.microbatch_index))
    return found
