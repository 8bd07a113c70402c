"""The schedules of torch.distributed.pipelining as programs.

Its classes work out their orders when they are made, from the numbers of a few attributes of their stages; so plain
objects stand in for stages, and no process group is needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.schedule import Program
from d9d_pipeline.schedule.from_torch import from_torch
from d9d_pipeline.schedule.placement import loop, vee

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


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
    """The forwards counted from 0: what Schedule1F1B shows of its last rank, unlike what it runs, counts from 1."""
    forwards = iter(range(len(order)))
    return [
        action._replace(microbatch_index=next(forwards)) if action and action.computation_type.value == "F" else action
        for action in order
    ]
