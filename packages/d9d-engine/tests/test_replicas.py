"""Replicas that take their own steps: factors of their losses, their norms, their mean, and refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Applied, Collective, GradientOwner
from d9d_engine.compose.communication.rows import grouped
from d9d_engine.compose.communication.step import Entry, StepCollectives
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.clip import Clipper, GradientNorm
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.loss import LossScale
from d9d_engine.step.ownership import Ownership, check_replicas, settle
from d9d_engine.step.replicas import Replicas, joined_meetings
from d9d_testing.world import World
from d9d_weights.sharding.shards import ReplicaSlice, describe, signature
from torch import Tensor, nn
from torch import distributed as dist

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


class Meetings:
    """Meetings every second step, which set a parameter to 7."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.starts = parameter, 0

    def start(self) -> None:
        self.starts += 1

    def due(self, steps: int) -> bool:
        return steps % 2 == 0

    @torch.no_grad()
    def meet(self) -> None:
        self.parameter.fill_(7.0)

    def state(self) -> Mapping[str, Tensor]:
        return {"a/held": torch.ones(1)}


def topology(**sizes: int) -> Topology:
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, math.prod(sizes.values()))
    return Topology(sizes=dict.fromkeys(AXES, 1) | sizes, rank=rank, world_size=count)


def factors(late: bool) -> dict[str, Any]:
    """Loss factors of a rank with 1, 2, 3 or 4 samples, whose loss sum is ten times its number of samples."""
    here = topology(dp_replicate=2, dp_shard=2)
    samples = float(here.rank + 1)
    task = SimpleNamespace(late=late, coefficients={"loss": 1.0}, weights=lambda _: {"loss": torch.tensor(samples)})
    group = here.axes_group("dp_replicate", "dp_shard")
    scale = LossScale(cast("Any", task), cast("Any", SimpleNamespace(terms=())), group, group, (here.rank // 2, 2))
    factor = scale.begin([{"x": torch.zeros(1)}])["loss"]
    scaled: list[float] = []
    gradients = SimpleNamespace(scale=lambda by: scaled.append(by.item()), device=here.device)
    loss = StageLoss({"loss": 10 * samples * factor}, torch.tensor(samples) if late else None)
    settled = scale.settle(loss, cast("Any", gradients)).terms["loss"]
    dist.all_reduce(settled)
    assert scale.share is not None
    return {"factor": factor.item(), "scaled": scaled, "mean": settled.item(), "share": scale.share.item()}


@pytest.mark.thorough
@pytest.mark.parametrize("late", [False, True], ids=["weights-of-data", "weights-of-outputs"])
def test_a_replica_trains_on_the_mean_of_its_own_samples_and_the_log_has_the_mean_of_all(late: bool) -> None:
    for rank, found in enumerate(World(4).run(factors, late)):
        own = (3.0, 7.0)[rank // 2]
        assert found["scaled" if late else "factor"] == pytest.approx([1 / own] if late else 1 / own)
        assert found["mean"] == pytest.approx(10.0)
        assert found["share"] == pytest.approx(own / 10)


def clipped(p: float, gradient: float) -> list[float]:
    """Clip a gradient of two equal elements, whose size depends on the replica."""
    here = topology(dp_replicate=2)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0 if here.rank == 0 else gradient)
    clipper = Clipper({"a": parameter}, {"loss": 1.0}, here, 1.0, GradientNorm(p), apart=("dp_replicate",))
    result = clipper.clip(StageLoss({"loss": torch.tensor(0.5)}), 1)
    return [result.grad_norm.item(), result.finite.item(), result.loss.item(), *parameter.grad.tolist()]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_each_replica_clips_by_its_own_norm(p: float) -> None:
    length = math.sqrt(2) if p == 2.0 else 1.0
    for found, gradient in zip(World(2).run(clipped, p, 0.1), (3.0, 0.1), strict=True):
        norm, finite, loss, first, _ = found
        assert norm == pytest.approx((3.0 + 0.1) / 2 * length)
        assert finite
        assert loss == 1.0
        assert first == pytest.approx(gradient / max(1.0, gradient * length), rel=1e-5)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_step_that_is_not_finite_in_one_replica_is_finite_in_none(p: float) -> None:
    assert [found[1] for found in World(2).run(clipped, p, math.nan)] == [False, False]


def mean_inside() -> dict[str, Any]:
    here = topology(dp_replicate=2)
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]) if here.rank == 0 else torch.tensor([2.0, -2.0]))
    meetings = Meetings(parameter)
    ownership = Ownership({}, apart=("dp_replicate",))
    replicas = Replicas({"a": parameter}, ownership, here, [meetings])
    replicas.start()
    before = replicas.differ, len(replicas.parameters())
    replicas.after_update(1)
    apart, means = replicas.differ, replicas.means()["a"].tolist()
    with suppress(KeyError), replicas.equal():
        inside = parameter.tolist()
        raise KeyError
    after = parameter.tolist()
    replicas.after_update(2)
    part = replicas.slices({"a": parameter})["a"]
    return {
        "before": before,
        "apart": apart,
        "means": means,
        "inside": inside,
        "after": after,
        "met": (replicas.differ, parameter.tolist(), replicas.means()),
        "place": (part.index, part.count, replicas.index, replicas.count),
        "starts": meetings.starts,
    }


def test_replicas_that_differ_are_replaced_by_their_mean_inside_a_block_only() -> None:
    for rank, found in enumerate(World(2).run(mean_inside)):
        assert found["before"] == (False, 0)
        assert found["apart"]
        assert found["means"] == found["inside"] == [1.5, 0.0]
        assert found["after"] == ([1.0, 2.0] if rank == 0 else [2.0, -2.0])
        assert found["met"] == (False, [7.0, 7.0], {})
        assert found["place"] == (rank, 2, rank, 2)
        assert found["starts"] == 1


def test_meetings_of_stages_are_held_together() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    joined = joined_meetings([Meetings(parameter) for parameter in parameters])
    assert joined is not None
    joined.start()
    assert [joined.due(steps) for steps in (1, 2)] == [False, True]
    joined.meet()
    assert [parameter.item() for parameter in parameters] == [7.0, 7.0]
    assert joined.state().keys() == {"a/held"}
    assert joined_meetings([]) is None


def test_one_replica_never_differs_and_holds_no_meetings() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    replicas = Replicas({"a": parameter}, Ownership({}), Topology(), [Meetings(parameter)])
    replicas.after_update(2)
    assert (replicas.count, replicas.kept, replicas.differ, parameter.item()) == (1, False, False, 0.0)


def test_replicas_that_differ_in_some_parameters_only_are_refused() -> None:
    here = topology(dp_replicate=2)
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
    claims = [GradientOwner(name, "dp_replicate", "none") for name in parameters]
    meetings = Meetings(parameters["a"])
    whole = [("local", Applied(modules=("",), gradients=tuple(claims), meetings=meetings))]
    assert check_replicas(parameters, settle(parameters, here, whole), here, whole).apart == ("dp_replicate",)
    part = [("local", Applied(modules=("",), gradients=tuple(claims[:1]), meetings=meetings))]
    with pytest.raises(BuildError, match="local lets replicas take their own steps over dp_replicate, but the gradie"):
        check_replicas(parameters, settle(parameters, here, part), here, part)
    # A pipeline rank without trained parameters has the same replicas.
    frozen = settle((), here, whole)
    assert check_replicas(parameters, frozen, here, whole).apart == ("dp_replicate",)
    assert check_replicas(parameters, settle(parameters, here, []), here, []).apart == ()


def test_a_slice_is_a_row_of_the_tensor_of_all_replicas() -> None:
    shards = describe({"a": ReplicaSlice(torch.zeros(2, 3), 1, 4), "b": ReplicaSlice(torch.zeros(()), 0, 4)})
    assert signature(shards) == [
        ["a", "float32", [4, 2, 3], [[[1, 0, 0], [1, 2, 3]]]],
        ["b", "float32", [4], [[[0], [1]]]],
    ]


def test_calls_of_some_steps_are_averaged_over_steps() -> None:
    each, some = (
        Entry("source", Collective("all_reduce", "dp_replicate", (0, 1), 100, 1, "meeting", every=every))
        for every in (1, 8)
    )
    (row,) = grouped([some, some])
    assert row.cells()[3] == "2 / 8 steps"
    assert StepCollectives(0, [some, each], [], []).total == {"all_reduce": (1.125, 112)}
