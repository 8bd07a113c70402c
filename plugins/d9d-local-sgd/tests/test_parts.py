"""Buckets of a meeting, its formulas without processes, its collectives, and costs."""

from __future__ import annotations

import pytest
import torch
from d9d_core.cost import StrategyCost
from d9d_local_sgd.buckets import bucket_bytes, buckets, means
from d9d_local_sgd.config import DiLoCoConfig, LocalSgdConfig
from d9d_local_sgd.costs import cost
from d9d_local_sgd.meetings import Averages, OuterSteps
from d9d_testing.layouts import job_of
from pydantic import ValidationError
from torch import distributed as dist
from torch import nn


def test_buckets_have_one_dtype_and_a_limited_size() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 1}
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    tensors["e"] = tensors["e"].double()
    found = list(buckets(tensors, limit=24))
    assert found == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [bucket_bytes(tensors, names) for names in found] == [24, 36, 4, 8]
    assert list(buckets({})) == []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A stage in bfloat16 with a frozen parameter, whose replicas are all equal: the sum of two doubles a value."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(2))
    stage = nn.Linear(2, 1, dtype=torch.bfloat16)
    stage.bias.requires_grad_(False)
    with torch.no_grad():
        stage.weight.copy_(torch.tensor([[1.0, -2.0]]))
    return stage


def test_an_average_of_equal_replicas_changes_nothing(alone: nn.Module) -> None:
    meetings, before = Averages(alone, None, 2, 3), alone.weight.clone()
    assert [steps for steps in range(1, 10) if meetings.due(steps)] == [3, 6, 9]
    meetings.meet()
    assert torch.equal(alone.weight, before)
    assert meetings.state() == {}


def test_a_shard_without_rows_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: reduced.append(tensor.numel()))
    tensors = {"empty": torch.zeros(0, 3), "wide": torch.ones(2, dtype=torch.float64)}
    found = dict(means(tensors, tensors.__getitem__, None, 2))
    assert reduced == [2]
    assert {name: mean.tolist() for name, mean in found.items()} == {"wide": [0.5, 0.5]}


def test_outer_steps_are_nesterov_steps_from_the_last_anchor(alone: nn.Module) -> None:
    meetings = OuterSteps(alone, None, 2, 3, lr=0.5, momentum=0.5)
    meetings.start()
    with torch.no_grad():
        alone.weight.copy_(torch.tensor([[0.0, -2.0]]))
    meetings.meet()  # outer gradient 1, momentum 1, update 1.5
    assert alone.weight.tolist() == [[0.25, -2.0]]
    meetings.meet()  # outer gradient 0, momentum 0.5, update 0.25
    assert alone.weight.tolist() == [[0.125, -2.0]]
    state = meetings.state()
    assert state.keys() == {"weight/anchor", "weight/outer_momentum"}  # nothing of the frozen bias
    assert state["weight/anchor"].dtype == torch.bfloat16
    assert torch.equal(state["weight/anchor"], alone.weight)
    assert state["weight/outer_momentum"].tolist() == [[0.5, 0.0]]
    assert state["weight/outer_momentum"].dtype == torch.float32


def test_a_plan_lists_the_meeting_and_its_average_per_step() -> None:
    values = {
        "steps": 4,
        "device": "cpu",
        "batch": {"size": 4},
        "model": {"name": "toy_model", "features": 6, "blocks": 3},
        "data": {"name": "toy_data", "features": 6},
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "trackers": [],
        "export": False,
        "mesh": {"dp_replicate": 4},
        "parallel": [{"name": "diloco", "period": 8}],
    }
    plan = job_of(values, ["d9d_testing.toy.plugin", "d9d_local_sgd.plugin"]).plan()
    (meeting,) = [e.collective for e in plan.collectives.entries if e.source == "diloco"]
    size = 4 * (3 * 36 + 1)
    assert (meeting.kind, meeting.ranks, meeting.bytes, meeting.every) == ("all_reduce", (0, 1, 2, 3), size, 8)
    others = [e.collective for e in plan.collectives.entries if e.source != "diloco"]
    calls, bytes_ = plan.collectives.total["all_reduce"]
    assert calls == len(others) + 1 / 8
    assert bytes_ == sum(one.bytes or 0 for one in others) + round(size / 8)
    assert max(one.bytes or 0 for one in others) < 100  # no gradients
    assert plan.memory.optimizer == 3 * size  # momentum of the toy optimizer, anchors, outer momentum


def test_costs_and_defaults_are_those_of_the_papers() -> None:
    outer = DiLoCoConfig()
    assert (outer.period, outer.outer_lr, outer.outer_momentum) == (500, 0.7, 0.9)
    assert cost(outer) == StrategyCost(meets_every=500, state=4.0, copies=1)
    assert cost(LocalSgdConfig(period=4)) == StrategyCost(meets_every=4)
    for wrong in ({"period": 0}, {"outer_momentum": 1.0}, {"outer_lr": 0.0}):
        with pytest.raises(ValidationError):
            DiLoCoConfig.model_validate(wrong)
