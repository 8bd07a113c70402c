"""The schedules of torch.distributed.pipelining as programs.

Its classes work out their orders when they are made, from the numbers of a few attributes of their stages; so plain
objects stand in for stages, and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
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
from d9d_pipeline.schedule.placement import Placement, loop, vee

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


TYPES: Mapping[str, type[MicrobatchAction]] = {
    "F": Forward, "B": Backward, "I": InputBackward, "W": WeightBackward,
}  # fmt: skip


def from_torch(pipeline_order: Mapping[int, Iterable[Any]], placement: Placement) -> list[Program]:
    """Programs with the order of computation of a torch schedule, and transfers inserted by our pass.

    Args:
        pipeline_order: rank -> the ``_Action`` of a schedule, or ``None`` for a pause, which says nothing here.
        placement: stages of each rank.
    """
    return insert_transfers([translate(pipeline_order[rank]) for rank in range(len(placement))], placement)


def translate(order: Iterable[Any]) -> list[Action]:
    found: list[Action] = []
    for action in order:
        if action is None:
            continue
        if action.sub_actions:
            forward, backward = translate(action.sub_actions)
            assert isinstance(forward, Forward)
            assert isinstance(backward, Backward | InputBackward)
            found.append(Overlap(forward, backward))
        elif kind := TYPES.get(action.computation_type.value):  # the rest is communication and memory
            found.append(kind(action.stage_index, action.microbatch_index))
    return found


def torch_programs(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[Program]:
    """The class of that name, with communication inserted by our pass."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            stage_index_to_group_rank={},
            is_first=index == 0,
            is_last=False,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for index in range(stages_per_rank)
    ]
    kind = getattr(schedules, name)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        order = kind(stages[0], microbatches)._get_pipeline_order()
        if name == "Schedule1F1B":
            order[ranks - 1] = renumbered(order[ranks - 1])
    else:
        order = kind(stages, microbatches).pipeline_order
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    return from_torch(order, vee(ranks) if v_shaped else loop(ranks, stages_per_rank))


def renumbered(order: list[Any]) -> list[Any]:
    """Forwards counted from 0; the shown order of Schedule1F1B's last rank counts from 1, unlike the one that runs."""
    forwards = iter(range(len(order)))
    return [
        action._replace(microbatch_index=next(forwards)) if action and action.computation_type.value == "F" else action
        for action in order
    ]
