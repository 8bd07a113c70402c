"""The metric ``router`` against routers whose choice is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from d9d_core.errors import BuildError, JobError
from d9d_core.metric import Table
from d9d_core.traits import HasTallies, modules_with
from d9d_engine.step.metrics import Statistics
from d9d_moe.router.metric import RouterMetric
from d9d_moe.router.metric_config import RouterMetricConfig
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.world import World
from torch import Tensor, nn

#: Tokens are one-hot: each chooses an expert of its own, by far.
EXPERTS = 4


class Layers(nn.ModuleDict):
    """Routers of k = 1 over E one-hot features, one per layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.stack([router(tokens[:, : router.experts]).weights.sum() for router in self.values()]).sum()


def layers(*sizes: int, **options: Any) -> Layers:
    made = Layers({f"layer{n}": TopKRouter(size, size, 1, std=0.0, **options) for n, size in enumerate(sizes)})
    for router in made.values():
        nn.init.eye_(router.weight).data.mul_(100)
    return made


def tokens(*counts: int) -> Tensor:
    return torch.eye(len(counts)).repeat_interleave(torch.tensor(counts), 0)


def metric(stage: nn.Module, *, per_layer: bool = False) -> RouterMetric:
    made = RouterMetric(RouterMetricConfig(per_layer=per_layer))
    made.attach(stage)
    return made


def observed(stage: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Values that the loop passes on after a forward."""
    stage(batch)
    modules = modules_with(stage, HasTallies)
    return {f"{name}/{key}": tally for name, module in modules.items() for key, tally in module.tallies().items()}


def test_layers_have_no_series_of_their_own_unless_asked_for() -> None:
    stage = layers(EXPERTS, EXPERTS)
    found = RouterMetric(RouterMetricConfig())
    found.attach(stage)
    found.update(observed(stage, tokens(1, 1, 1, 1)))
    shared = {"router/entropy", "router/max_violation", "router/mean_violation", "router/load"}
    assert found.compute().keys() == shared


def test_load_is_relative_to_an_even_spread_over_all_microbatches() -> None:
    stage = layers(EXPERTS, EXPERTS)
    found = metric(stage)
    for counts in ((4, 0, 1, 1), (2, 0, 1, 3)):
        found.update(observed(stage, tokens(*counts)))
    values = dict(found.compute())
    load = values.pop("router/load")
    assert isinstance(load, Table)
    assert load.values.tolist() == [[2.0, 0.0, pytest.approx(2 / 3), pytest.approx(4 / 3)]] * 2
    assert (load.row, load.column, load.unit, load.neutral) == ("layer", "expert", "load / uniform", 1.0)
    assert {name: value.item() for name, value in values.items()} == {
        "router/entropy": pytest.approx(0.0, abs=1e-6),
        "router/max_violation": 1.0,
        "router/mean_violation": 1.0,
    }


def test_layers_differ() -> None:
    stage = layers(EXPERTS, EXPERTS)
    nn.init.zeros_(stage["layer1"].weight)  # every score is the same: all go to expert 0
    found = metric(stage, per_layer=True)
    found.update(observed(stage, tokens(2, 2, 2, 2)))
    values = {name: value.item() for name, value in found.compute().items() if isinstance(value, Tensor)}
    assert values == {
        "router/entropy": pytest.approx(math.log(EXPERTS) / 2, rel=1e-6),
        "router/entropy/layer0": pytest.approx(0.0, abs=1e-6),
        "router/entropy/layer1": pytest.approx(math.log(EXPERTS), rel=1e-6),
        "router/max_violation": EXPERTS - 1,
        "router/mean_violation": (EXPERTS - 1) / 2,
        "router/violation/layer0": 0.0,
        "router/violation/layer1": EXPERTS - 1,
    }


def test_dropped_rows_are_a_fraction_of_all() -> None:
    stage = layers(EXPERTS, capacity=1.0)
    found = metric(stage, per_layer=True)
    found.update(observed(stage, tokens(5, 1, 1, 1)))  # an expert takes 2
    values = found.compute()
    assert values["router/dropped"].item() == values["router/dropped/layer0"].item() == 3 / 8
    assert values["router/load"].values.tolist() == [[5 / 2, 1 / 2, 1 / 2, 1 / 2]]


def test_a_capacity_of_one_layer_says_nothing_about_others() -> None:
    stage = Layers({"free": layers(EXPERTS)["layer0"], "limited": layers(EXPERTS, capacity=1.0)["layer0"]})
    found = metric(stage, per_layer=True)
    found.update(observed(stage, tokens(5, 1, 1, 1)))
    values = found.compute()
    assert values["router/dropped"].item() == 3 / 16
    assert values["router/dropped/limited"].item() == 3 / 8
    assert "router/dropped/free" not in values


def test_layers_may_have_different_numbers_of_experts() -> None:
    stage = layers(2, EXPERTS)
    found = metric(stage)
    found.update(observed(stage, tokens(1, 1, 0, 0)))
    load = found.compute()["router/load"].values
    assert load.nan_to_num(-1).tolist() == [[1.0, 1.0, -1.0, -1.0], [2.0, 2.0, 0.0, 0.0]]
    assert found.compute()["router/mean_violation"].item() == 0.5


def test_counts_stay_exact_beyond_what_float32_counts() -> None:
    stage = layers(2)
    found = metric(stage)
    one = observed(stage, tokens(2, 1))
    found.update(one | {"layer0/expert_tokens": torch.tensor([2**24 + 1, 2**40 + 1])})
    found.update(one)
    assert found.state()["expert_tokens"].tolist() == [[2**24 + 3, 2**40 + 2]]


def test_without_any_token_nothing_has_a_value() -> None:
    stage = layers(2, EXPERTS, capacity=1.0)
    found = metric(stage, per_layer=True)
    found.update(observed(stage, tokens(0, 0, 0, 0)))
    values = dict(found.compute())
    assert values.pop("router/load").values.isnan().all()
    assert len(values) == 4 + 3 * 2
    assert all(value.isnan() for value in values.values() if isinstance(value, Tensor))


def test_a_layer_that_saw_no_token_is_left_out() -> None:
    stage = layers(EXPERTS, EXPERTS, capacity=1.0)
    found = metric(stage)
    found.update(observed(stage, tokens(5, 1, 1, 1)))
    unseen = {key: torch.zeros_like(tally) for key, tally in observed(stage, tokens(1, 1, 1, 1)).items()}
    first = {key: value for key, value in found.compute().items() if isinstance(value, Tensor)}
    found.reset()
    found.update(observed(stage, tokens(5, 1, 1, 1)) | {k: v for k, v in unseen.items() if k.startswith("layer1")})
    values = dict(found.compute())
    assert values.pop("router/load").values.isnan().tolist() == [[False] * EXPERTS, [True] * EXPERTS]
    assert values == first


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["layers.1.ffn.router", "layers.3.ffn.router", "layers.12.ffn.router"], ("1", "3", "12")),
        (["layers.1.ffn.router"], ("1",)),
        (["layers.0.router", "extra.1.router"], ("layers.0.router", "extra.1.router")),
        (
            ["parts.0.layers.0.router", "parts.1.layers.0.router"],
            ("parts.0.layers.0.router", "parts.1.layers.0.router"),
        ),
        (["layers.0.router", "layers.1.0.router"], ("layers.0.router", "layers.1.0.router")),
        (["first.router", "second.router"], ("first.router", "second.router")),
    ],
)
def test_rows_are_called_by_their_layers(names: list[str], rows: tuple[str, ...]) -> None:
    stage = nn.Module()
    for name in names:
        nest(stage, name.split("."), layers(EXPERTS)["layer0"])
    found = metric(stage)
    tallies = [observed(layers(EXPERTS), tokens(1, 0, 0, 0)) for _ in names]
    found.update(
        {k.replace("layer0", name): t for name, own in zip(names, tallies, strict=True) for k, t in own.items()}
    )
    assert found.compute()["router/load"].rows == rows


def nest(parent: nn.Module, path: list[str], module: nn.Module) -> None:
    for part in path[:-1]:
        if part not in dict(parent.named_children()):
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(path[-1], module)


def test_a_period_of_skipped_steps_has_no_values() -> None:
    stage = layers(EXPERTS)
    statistics = Statistics({"router": RouterMetric(RouterMetricConfig())}, gated=True)
    statistics.attach(stage)
    statistics.begin()
    statistics.tally(observed(stage, tokens(3, 1, 0, 0)))
    statistics.settle(torch.tensor(False))
    values = {name: value for name, value in statistics.compute().items() if isinstance(value, Tensor)}
    assert values.keys() == {"router/entropy", "router/max_violation", "router/mean_violation"}
    assert all(value.isnan() for value in values.values())


def merged() -> list[list[float]]:
    stage = layers(EXPERTS)
    statistics = Statistics({"router": RouterMetric(RouterMetricConfig())}, gated=True, group=dist.group.WORLD)
    statistics.attach(stage)
    for finite in (True, False):
        statistics.begin()
        statistics.tally(observed(stage, tokens(*((3, 1, 0, 0) if dist.get_rank() else (0, 0, 2, 2)))))
        statistics.settle(torch.tensor(finite))
    table = statistics.compute()["router/load"]
    assert isinstance(table, Table)
    loads: list[list[float]] = table.values.tolist()
    return loads


@pytest.mark.thorough
def test_ranks_add_up_and_steps_that_do_not_count_are_left_out(world: type[World]) -> None:
    assert world(2).run(merged) == [[[1.5, 0.5, 1.0, 1.0]]] * 2


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(BuildError, match="has no routers; remove the metric"):
        metric(nn.Linear(2, 2))


def test_missing_tallies_are_an_error() -> None:
    with pytest.raises(JobError, match="no tallies of layer0"):
        metric(layers(2)).update({"token_loss": torch.zeros(1)})
    with pytest.raises(JobError, match="no tallies of any router"):
        RouterMetric(RouterMetricConfig()).update({})


def test_sums_move_to_the_device_of_the_tallies_or_of_a_loaded_state() -> None:
    stage = layers(EXPERTS, 2)
    found, other = metric(stage), metric(stage)
    found.update({name: tally.to("meta") for name, tally in observed(stage, tokens(1, 2, 1, 1)).items()})
    other.load_state(found.state())
    for one in (found, other):
        assert {name: (total.device.type, total.dtype) for name, total in one.state().items()} == {
            "expert_tokens": ("meta", torch.int64), "tokens": ("meta", torch.int64), "entropy": ("meta", torch.float64),
        }  # fmt: skip
        load = one.compute()["router/load"]
        assert isinstance(load, Table)
        assert load.values.device.type == "meta"
