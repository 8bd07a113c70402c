"""Building a stage keeps ties, and parameters that the model itself froze."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_engine.compose.initialise import _uneven, initialise
from d9d_engine.compose.weights import materialise
from d9d_engine.job import Job
from d9d_engine.step.metrics import Statistics
from d9d_testing.toy.model import ToyModel
from d9d_testing.toy.runs import quiet
from torch import Tensor, nn
from torch import distributed as dist

MakeJob = Callable[..., Job]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.thorough
def test_tied_parameters_stay_one_parameter() -> None:
    with torch.device("meta"):
        stage = Tied()
    materialise(stage, frozenset(), 0, torch.device("cpu"))
    assert [name for name, _ in stage.named_parameters()] == ["embedding.weight"]
    assert stage.get_parameter("head.weight") is stage.get_parameter("embedding.weight")


class Sides(nn.Module):
    """Weights that want to follow each other, some of which may not."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(3, 4, bias=False), nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(changes.get("features", 3), 2, bias=False, dtype=changes.get("dtype"))
        if changes.get("tied"):
            self.between.weight = self.first.weight

    def adjacent_weights(self) -> list[tuple[str, str]]:
        return [("first.weight", "second.weight")]


@pytest.mark.parametrize(
    ("changes", "host", "beside"),
    [
        ({}, (), True),
        ({}, ("second.weight",), False),
        ({"tied": True}, (), False),
        ({"features": 5}, (), False),
        ({"dtype": torch.float64}, (), False),
    ],
    ids=["plain", "one on the host", "tied", "other features", "other dtype"],
)
def test_adjacent_weights_follow_each_other_in_memory_where_they_can(
    changes: dict[str, Any], host: tuple[str, ...], beside: bool
) -> None:
    with torch.device("meta"):
        stage, plain = Sides(**changes), Sides(**changes)
    plain.adjacent_weights = list  # type: ignore[method-assign]
    for each in (stage, plain):
        materialise(each, frozenset(host), 0, torch.device("cpu"))
    first, second = stage.first.weight, stage.second.weight
    assert (first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()) == beside
    if beside:
        assert second.data_ptr() == first.data_ptr() + first.nbytes
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, stage.get_parameter(name)), name


def test_a_module_without_initial_values_for_what_it_owns_is_refused_by_name() -> None:
    hollow, owner = nn.Module(), nn.Module()
    hollow.register_parameter("bias", None)
    hollow.register_buffer("running", None)
    stage = nn.ModuleDict({"hollow": hollow, "full": nn.Linear(1, 1)})
    initialise(stage, 0, torch.device("cpu"))
    owner.register_parameter("bias", None)
    owner.weight = nn.Parameter(torch.ones(1))
    stage["owner"] = owner
    with pytest.raises(
        BuildError, match=r"module 'owner' \(Module\) owns bias, weight but has no reset_parameters\(\)"
    ):
        initialise(stage, 0, torch.device("cpu"))


@pytest.mark.parametrize(("held", "advised"), [(5, 6), (7, 12), (13, 18)])
def test_a_parameter_that_ranks_cannot_share_evenly_is_refused_with_the_next_number_of_rows(
    held: int, advised: int
) -> None:
    mesh = SimpleNamespace(shape=(2, 3), size=lambda: 6)
    text = _uneven(nn.Embedding(held, 4), "weight", SimpleNamespace(shape=torch.Size([held, 4]), device_mesh=mesh))
    assert text.startswith(f"Embedding.weight has {held} rows, which 2 x 3 ranks (data parallelism x tp) cannot share")
    assert f"; choose {advised} rows (for a vocabulary" in text


@pytest.mark.thorough
def test_what_the_model_froze_is_not_trained(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    init = ToyModel.__init__

    def frozen(self: ToyModel, config: Any, stage: Stage) -> None:
        init(self, config, stage)
        self.layers["0"].requires_grad_(False)

    monkeypatch.setattr(ToyModel, "__init__", frozen)
    trainer = quiet(job())
    trainer.train()
    assert "layers.0.weight/momentum" not in trainer.step.optimizer.state()
    assert "layers.1.weight/momentum" in trainer.step.optimizer.state()


class Counter:
    """Counts samples; loads in place, as the protocol allows."""

    reductions = {"count": "sum"}

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def update(self, observations: dict[str, Tensor]) -> None:
        self.count += observations["x"].sum()

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.count.copy_(state["count"])

    def compute(self) -> dict[str, Tensor]:
        return {"count": self.count.clone()}

    def reset(self) -> None:
        self.count.zero_()


def counted() -> list[float]:
    statistics = Statistics({"samples": Counter()}, gated=False, group=dist.group.WORLD)  # type: ignore[dict-item]
    found = []
    for _ in range(3):
        statistics.update({"x": torch.ones(4)})
        found.append(statistics.compute()["count"].item())
    return found


def saved_in_between() -> list[float]:
    statistics = Statistics({"samples": Counter()}, gated=False, group=dist.group.WORLD)  # type: ignore[dict-item]
    statistics.update({"x": torch.ones(4)})
    saved = statistics.tensors()["samples/count"].item()
    statistics.update({"x": torch.ones(4)})
    return [saved, statistics.compute()["count"].item()]


@pytest.mark.thorough
def test_a_save_in_between_counts_what_was_counted_before_it_once(world: Any) -> None:
    assert world(2).run(saved_in_between) == [[8, 16]] * 2


def test_metrics_of_all_ranks_are_merged_without_touching_each_ranks_own(world: Any) -> None:
    assert world(2).run(counted) == [[8, 16, 24]] * 2
