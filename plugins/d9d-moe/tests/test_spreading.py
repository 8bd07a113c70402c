"""Experts sharded over the ranks of a simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import GradientOwner, StepShape
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_engine.plugin import d9d_views
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.all_to_all.separate import SeparateDispatcher
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.expert_parallel.communication import features_of
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.dispatchers import replace_dispatchers
from d9d_moe.expert_parallel.strategy import ExpertParallel
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

FEATURES, INSIDE = 6, 10


def layer(experts: int, chosen: int = 2) -> MoELayer:
    router = TopKRouter(FEATURES, experts, top_k=chosen, std=0.02)
    banks = GroupedSwiGLU(FEATURES, INSIDE, experts, std=0.02, output_std=0.02)
    return MoELayer(router, banks, LocalDispatcher())


@pytest.fixture
def topology() -> Iterator[Topology]:
    """Rank 0 of four ranks, of which two hold the experts of a layer together."""
    made = Topology(
        sizes={"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 2},
        world_size=4,
        views={view.name: view for view in d9d_views()},
        simulated=True,
    )
    with simulated_world(4):
        yield made


def apply(stage: nn.Module, topology: Topology, **fields: Any) -> Any:
    return ExpertParallel(ExpertParallelConfig(**fields)).apply(stage, topology)


def test_each_rank_keeps_its_share_of_every_layer(topology: Topology) -> None:
    with torch.device("meta"):
        stage = nn.ModuleList([layer(8), layer(4), layer(8)])
    stage[1].experts.up_proj.requires_grad_(False)
    applied = apply(stage, topology)
    names = [f"{number}.experts.{bank}" for number in range(3) for bank in ("gate_proj", "up_proj", "down_proj")]
    assert applied.modules == ("0", "1", "2", "0.experts", "1.experts", "2.experts")
    assert applied.gradients == tuple(GradientOwner(name, "ep", "none") for name in names)
    assert applied.views == dict.fromkeys(names, "expert")
    assert applied.outside_graph == ("0", "1", "2")
    for number, share in enumerate((4, 2, 4)):
        bank = stage[number].experts
        assert [list(parameter.to_local().shape) for parameter in bank.parameters()] == [
            [share, FEATURES, INSIDE], [share, FEATURES, INSIDE], [share, INSIDE, FEATURES],
        ]  # fmt: skip
        assert all(parameter.placements == (Shard(0),) for parameter in bank.parameters())
        assert bank.gate_proj.shape[0] == 2 * share
    assert [parameter.requires_grad for parameter in stage[1].experts.parameters()] == [True, False, True]
    first, second, third = (module.dispatcher for module in stage)
    assert isinstance(first, AllToAllDispatcher)
    assert first is third
    assert [(one.experts, one.local) for one in (first, second)] == [(8, 4), (4, 2)]
    listed = list(applied.collectives(StepShape(("forward", "backward"), samples=2, positions=8, itemsize=2)))
    assert [one.ranks for one in listed] == [(0, 1)] * 21
    # A token of four features: of the 28 pairs of 8 experts, 6 are on the other rank alone; of the 6 of 4, one is.
    rows = [one.bytes for one in listed if one.purpose.startswith("tokens")]
    assert rows == [round(16 * 2 * (1 - share) * FEATURES * 2) for share in (6 / 28, 1 / 6, 6 / 28)]


def test_outputs_may_return_separately(topology: Topology) -> None:
    with torch.device("meta"):
        stage = layer(8, chosen=3)
    applied = apply(stage, topology, combine="separate")
    assert isinstance(stage.dispatcher, SeparateDispatcher)
    assert applied.modules == ("", "experts")
    listed = list(applied.collectives(StepShape(("forward", "backward"), samples=2, positions=8, itemsize=2)))
    # Each of the three choices of a token is a row with one label of two numbers, and one weight.
    assert [one.bytes for one in listed[1:]] == [
        16 * 3 * FEATURES * 2, 16 * 3 * 2 * 4, 16 * 3 * FEATURES * 2,
        16 * 3 * FEATURES * 2, 16 * 3 * FEATURES * 2, 16 * 3 * 4,
    ]  # fmt: skip
    assert [(one.purpose, one.module, one.approximate) for one in listed] == [
        ("row counts of ", "", False),
        ("tokens of , forward", "", True),
        ("labels of , forward", "", True),
        ("outputs of , forward", "", True),
        ("gradients of outputs of , backward", None, True),
        ("gradients of tokens of , backward", None, True),
        ("gradients of weights of , backward", None, True),
    ]


def test_a_number_of_experts_that_no_rank_can_share_is_refused(topology: Topology) -> None:
    with torch.device("meta"):
        stage = nn.ModuleList([layer(8), layer(5)])
    with pytest.raises(BuildError, match="mesh.ep is 2, which does not divide the 5 experts of '1.experts'"):
        apply(stage, topology)


class Bank(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)
        self.plain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, plus: float) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        assert not isinstance(self.scale, DTensor)
        return x * self.scale + plus


def test_a_bank_computes_with_local_tensors_and_has_its_own_again_after_an_error(topology: Topology) -> None:
    from d9d_moe.expert_parallel.local_banks import compute_with_local_banks

    mesh = topology.mesh("expert", "ep")
    bank = Bank(DTensor.from_local(torch.tensor([2.0, 3.0]), mesh, [Shard(0)], run_check=False))
    compute_with_local_banks(bank)
    assert bank(torch.tensor([1.0, 10.0]), plus=0.5).tolist() == [2.5, 30.5]
    assert isinstance(bank.scale, DTensor)
    with pytest.raises(ValueError, match="not a number"):
        bank(torch.tensor([torch.nan]), plus=0.0)
    assert isinstance(bank.scale, DTensor)
    assert not isinstance(bank.plain, DTensor)


def test_features_are_those_of_the_banks_that_declare_them() -> None:
    assert features_of(layer(4)) == FEATURES
    other = layer(4)
    other.experts = nn.Linear(3, 5)  # type: ignore[assignment] - of a third party
    assert features_of(other) is None


def test_a_stage_without_experts_keeps_its_modules() -> None:
    made: list[int] = []
    assert replace_dispatchers(nn.Linear(2, 2), made.append) == ()  # type: ignore[arg-type] - is not called
    assert made == []
    stage = nn.ModuleList([layer(4), layer(2), layer(4)])
    assert replace_dispatchers(stage, lambda experts: made.append(experts) or LocalDispatcher()) == ("0", "1", "2")
    assert made == [4, 2]
