"""Copies of one parameter stay equal, and are updated by the sum of their gradients."""

from __future__ import annotations

import pytest
import torch
from d9d_core.program.placement import Pipeline
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.tied import find_ties
from d9d_testing.world import World
from torch import distributed as dist
from torch import nn

HOSTS = (0, 1, 1, 0)
#: ``edge`` is on both ends, which rank 0 has; ``inner`` on both ranks, and on rank 1 twice.
SHARED = {"edge": (0, 3), "inner": (0, 1, 2), "frozen": (0, 2, 3)}


class Part(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        for name, holders in SHARED.items():
            if index in holders:
                setattr(self, name, nn.Parameter(torch.full((2,), float(index)), requires_grad=name != "frozen"))


def summed() -> tuple[dict[int, dict[str, float]], dict[str, float], list[str]]:
    """Values after a spread, gradients after a reduction, and what another rank counts; runs on every rank."""
    place = dist.get_rank()
    topology = Topology(sizes={**Topology().sizes, "pp": 2}, rank=place, world_size=2)
    stages = {index: Part(index) for index, host in enumerate(HOSTS) if host == place}
    ties = find_ties(stages, SHARED, {"edge", "inner"}, Pipeline(hosts=HOSTS, ranks=2), topology)
    ties.copy_values()
    values = {
        index: {name: parameter[0].item() for name, parameter in stage.named_parameters()}
        for index, stage in stages.items()
    }
    for index, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad and (index, name) != (1, "inner"):  # the first copy of rank 1 got none
                parameter.grad = torch.full((2,), 10.0**index)
    ties.gather()
    ties.reduce()
    firsts: dict[str, float] = {}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                firsts.setdefault(name, parameter.grad[0].item())
    ties.reset()
    left = [n for stage in stages.values() for n, parameter in stage.named_parameters() if parameter.grad is not None]
    assert sorted(left) == sorted(firsts)
    return values, firsts, sorted(ties.elsewhere)


@pytest.mark.thorough
def test_gradients_of_copies_add_up_on_a_rank_and_over_ranks(world: type[World]) -> None:
    first, second = world(2).run(summed)
    values = {0: {"edge": 0.0, "inner": 0.0, "frozen": 0.0}, 3: {"edge": 0.0, "frozen": 0.0}}
    assert first == (values, {"edge": 1001.0, "inner": 101.0}, [])
    values = {1: {"inner": 1.0}, 2: {"inner": 1.0, "frozen": 2.0}}
    assert second == (values, {"inner": 101.0}, ["frozen", "inner"])


def test_copies_on_one_rank_need_no_other() -> None:
    stages = {index: Part(index) for index in range(len(HOSTS))}
    ties = find_ties(stages, SHARED, {"edge", "inner"}, Pipeline(hosts=(0,) * len(HOSTS), ranks=1), Topology())
    ties.copy_values()
    assert [stages[index].get_parameter("inner")[0].item() for index in (0, 1, 2)] == [0.0] * 3
    for index in (1, 2):
        stages[index].get_parameter("inner").grad = torch.full((2,), 10.0**index)
    ties.gather()
    ties.reduce()
    gradient = stages[0].get_parameter("inner").grad
    assert gradient is not None
    assert gradient.tolist() == [110.0, 110.0]
    assert ties.elsewhere == frozenset()
