"""Owners of reductions, buckets, and the norm over parameters that live on different meshes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_core.strategy import Applied, GradientOwner
from d9d_core.tensors import local
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_engine.plugin import d9d_views
from d9d_engine.step.clip import Clipper, GradientNorm
from d9d_engine.step.executor import StageLoss
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import settle
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SIZES = Mesh(dp_replicate=2, dp_shard=2).sizes()


def here(**mesh: int) -> Topology:
    views = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
    sizes = Mesh(**mesh).sizes()
    return Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=views)


# --- owners


def claiming(*claims: GradientOwner) -> Applied:
    """Result of a strategy that owns these reductions."""
    return Applied(modules=("",), gradients=claims)


def test_what_nobody_claims_over_a_data_axis_is_summed_by_the_synchroniser() -> None:
    claims = [("fsdp", claiming(GradientOwner("a", "dp_shard", "fsdp")))]
    owned = settle(["a", "b"], Topology(sizes=SIZES), claims)
    assert owned.synchronised("a") == ("dp_replicate",)
    assert owned.synchronised("b") == ("dp_replicate", "dp_shard")
    assert ("dp_shard", "fsdp, sum", ("a",)) in owned.table()


def test_a_reduction_with_two_owners_is_refused() -> None:
    claim = GradientOwner("a", "dp_shard", "fsdp")
    with pytest.raises(
        BuildError, match="'a' would be reduced twice over dp_shard: by parallel\\[0\\] and by parallel"
    ):
        settle(["a"], Topology(sizes=SIZES), [("parallel[0]", claiming(claim)), ("parallel[1]", claiming(claim))])


def test_axes_of_one_rank_and_frozen_parameters_need_no_owner() -> None:
    claims = [("s", claiming(GradientOwner("frozen", "dp_shard", "fsdp"), GradientOwner("a", "tp", "sync")))]
    assert settle(["a"], Topology(), claims).table() == []
    assert settle([], Topology(sizes=SIZES), claims).table() == []


def test_a_claim_over_an_axis_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BuildError, match="s reduces 'a' over the unknown axis 'dp'; name one of "):
        settle(["a"], Topology(sizes=SIZES), [("s", claiming(GradientOwner("a", "dp", "sync")))])


def test_a_parameter_of_a_view_is_summed_over_what_the_view_leaves() -> None:
    topology = Topology(sizes=Mesh(dp_replicate=2, dp_shard=4, ep=2).sizes(), views={v.name: v for v in d9d_views()})
    spread = Applied(modules=("",), gradients=(GradientOwner("e", "ep", "none"),), views={"e": "expert"})
    sharded = claiming(
        GradientOwner("e", "expert_fsdp", "fsdp"),
        GradientOwner("e", "dp_shard", "fsdp"),  # covered by dimensions of the view
        GradientOwner("a", "dp_shard", "fsdp"),
    )
    owned = settle(["a", "e"], topology, [("expert_parallel", spread), ("fsdp", sharded)])
    assert owned.synchronised("a") == ("dp_replicate",)
    assert owned.synchronised("e") == ("expert_replicate",)
    assert owned.views == {"e": "expert"}
    assert ("ep", "none", ("e",)) in owned.table()
    assert "dp_shard" not in owned.owners["e"]
    other = claiming(GradientOwner("e", "elsewhere", "fsdp"))
    with pytest.raises(
        BuildError, match="fsdp reduces 'e' over the unknown axis 'elsewhere'; name one of .*expert_fsdp"
    ):
        settle(["a", "e"], topology, [("expert_parallel", spread), ("fsdp", other)])


def test_a_parameter_of_two_views_is_refused() -> None:
    topology = Topology(views={v.name: v for v in d9d_views()})
    one, other = (Applied(modules=("",), views={"e": view}) for view in ("expert", "batch"))
    with pytest.raises(BuildError, match="b places 'e' on the view 'batch', another strategy on 'expert'"):
        settle(["e"], topology, [("a", one), ("b", other)])


# --- buckets


def summed(bucket_elements: int, unused_on: dict[str, list[int]], microbatches: int, dtype: str) -> dict[str, Any]:
    """Gradients of four parameters, each 10**index * (rank + 1) per microbatch, some unused on some ranks."""
    topology = here(dp_shard=dist.get_world_size())
    width = getattr(torch, dtype)
    parameters = {f"p{i}": nn.Parameter(torch.zeros(4 + i, dtype=width)) for i in range(4)}
    ownership = settle(parameters, topology, [])
    # bfloat16 adds up in float32, so that a rank without a gradient must know the format of the others.
    gradients = _with_limit(parameters, ownership, topology, bucket_elements * 4, torch.float32)
    for index in range(microbatches):
        gradients.before_backward(last=index == microbatches - 1)
        parts = [
            (p * 10.0**i * (topology.rank + 1)).sum()
            for i, (n, p) in enumerate(parameters.items())
            if topology.rank not in unused_on.get(n, [])
        ]
        if parts:
            torch.stack(parts).sum().backward()
    gradients.reduce(0)
    gradients.finish()
    return {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}


def _with_limit(parameters: Any, ownership: Any, topology: Topology, limit: int, accumulate: torch.dtype) -> Gradients:
    from d9d_engine.step import gradients as module

    unit, module.MIB = module.MIB, limit
    try:
        return Gradients(parameters, ownership, topology, bucket_mib=1, accumulate=accumulate)
    finally:
        module.MIB = unit


@pytest.mark.thorough
@pytest.mark.smoke
def test_gradients_outside_of_fsdp_are_summed_whatever_is_used_where(world: Any) -> None:
    cases: list[tuple[int, dict[str, list[int]], int, str]] = [
        (1000, {}, 1, "float32"),
        (1, {}, 2, "float32"),
        (6, {"p3": [0], "p1": [1]}, 1, "float32"),  # the last bucket to fill is another one on each rank
        (6, {"p0": [0, 1]}, 2, "float32"),
        (6, {f"p{i}": [1] for i in range(4)}, 1, "float32"),  # a rank without any gradient
        (6, {"p3": [0], "p1": [1]}, 2, "bfloat16"),
        (6, {f"p{i}": [1] for i in range(4)}, 1, "bfloat16"),
        (6, {f"p{i}": [0, 1] for i in range(4)}, 1, "bfloat16"),
    ]
    for case, found in zip(cases, zip(*world(2).run(all_cases, cases), strict=True), strict=True):
        _, unused, microbatches, _ = case
        for name in ("p0", "p1", "p2", "p3"):
            factor = 10.0 ** int(name[1]) * microbatches
            expected = factor * sum(rank + 1 for rank in range(2) if rank not in unused.get(name, []))
            for gradients in found:
                assert gradients[name].tolist() == [expected] * (4 + int(name[1])), (case, name)


class Silent:
    """A strategy that reduces by itself."""

    def before_backward(self, last: bool, complete: bool = True) -> None: ...
    def after_weights(self) -> None: ...
    def reduce(self) -> None: ...


def launched_in_backward(reducers: int) -> bool:
    topology = here(dp_shard=dist.get_world_size())
    parameters = {"p": nn.Parameter(torch.zeros(4))}
    ownership = settle(parameters, topology, [])
    gradients = Gradients(parameters, ownership, topology, {0: [Silent()] * reducers})
    gradients.before_backward(last=True)
    parameters["p"].sum().backward()
    launched = gradients._buckets._next > 0
    gradients.reduce(0)
    gradients.finish()
    assert parameters["p"].grad is not None
    assert parameters["p"].grad.tolist() == [dist.get_world_size()] * 4
    return launched


@pytest.mark.thorough
def test_reductions_overlap_with_the_backward_unless_a_strategy_reduces_meanwhile(world: Any) -> None:
    """Ranks without a gradient launch later, so over the same ranks the order would not be the same everywhere."""
    assert world(2).run(launched_in_backward, 0) == [True] * 2
    assert world(2).run(launched_in_backward, 1) == [False] * 2


def test_one_gradient_is_not_summed_over_one_axis_and_maximised_over_another() -> None:
    claims = [GradientOwner("p", "dp_replicate", "sync"), GradientOwner("p", "tp", "sync", "max")]
    parameters = {"p": nn.Parameter(torch.zeros(4))}
    topology = Topology(sizes=Mesh(dp_replicate=2, tp=2).sizes(), world_size=4, simulated=True)
    with (
        simulated_world(4),
        pytest.raises(BuildError, match="'p' to the trainer: by sum over dp_replicate and by max over tp"),
    ):
        Gradients(parameters, settle(parameters, topology, [("s", claiming(*claims))]), topology)


def all_cases(cases: list[Any]) -> list[dict[str, Any]]:
    return [summed(*case) for case in cases]


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_many_small_gradients_add_up_in_the_accumulation_format(accumulate: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    gradients = Gradients({"p": parameter}, settle(["p"], Topology(), []), Topology(), accumulate=accumulate)
    for index in range(300):
        gradients.before_backward(last=index == 299)
        (parameter * 1.0).sum().backward()
    gradients.reduce(0)
    gradients.finish()
    assert parameter.grad is not None
    # bfloat16 has 8 bits: from 256 on, adding one changes nothing.
    assert parameter.grad[0].item() == (256 if accumulate is None else 300)
    assert parameter.grad.dtype == (accumulate or torch.bfloat16)


# --- norm and clipping


def mixed_norm(p: float, max_norm: float | None) -> tuple[float, float, list[Any]]:
    """Parameters whole, sharded once, sharded on one axis of two, and on another mesh."""
    topology = here(dp_replicate=2, dp_shard=2, ep=2)
    dense, expert = topology.mesh("dense", "dp_replicate", "fsdp"), topology.mesh("expert", "ep")
    torch.manual_seed(0)
    values = [torch.randn(5, 3), torch.randn(7, 2), torch.randn(4), torch.randn(6, 2), torch.randn(1, 2)]
    placed: list[Any] = [
        values[0],
        distribute_tensor(values[1], dense, [Replicate(), Shard(0)], src_data_rank=None),  # uneven: 4 and 3 rows
        distribute_tensor(values[2], dense, [Shard(0), Shard(0)], src_data_rank=None),
        distribute_tensor(values[3], expert, [Shard(0)], src_data_rank=None),
        distribute_tensor(values[4], dense, [Replicate(), Shard(0)], src_data_rank=None),  # one rank has no row
    ]
    parameters = {str(i): nn.Parameter(torch.zeros_like(value)) for i, value in enumerate(placed)}
    for parameter, gradient in zip(parameters.values(), placed, strict=True):
        parameter.grad = gradient.clone()
    clipper = Clipper(parameters, {"a": 2.0}, topology, max_norm, GradientNorm(p))
    totals = clipper.clip(StageLoss({"a": torch.tensor(0.25)}), tokens=10 + topology.rank)
    wholes = [g.full_tensor() if isinstance(g := q.grad, DTensor) else g for q in parameters.values()]
    assert totals.tokens.item() == 46
    return totals.grad_norm.item(), totals.loss.item(), wholes


def norms(p: float, max_norm: float | None) -> Any:
    return mixed_norm(p, max_norm)


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.parametrize(("p", "max_norm"), [(2.0, None), (2.0, 0.5), (1.0, 0.5), (3.0, None), (math.inf, 0.5)])
def test_the_norm_is_that_of_the_whole_gradient_on_any_mesh(world: Any, p: float, max_norm: float | None) -> None:
    torch.manual_seed(0)
    whole = torch.cat([torch.randn(*shape).flatten() for shape in ((5, 3), (7, 2), (4,), (6, 2), (1, 2))])
    expected = torch.linalg.vector_norm(whole, p).item()
    for norm, loss, wholes in world(4).run(norms, p, max_norm):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert loss == pytest.approx(2.0)
        clipped = torch.cat([gradient.flatten() for gradient in wholes])
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (expected + 1e-6))
        torch.testing.assert_close(clipped, whole * factor)


def flagged(p: float) -> tuple[bool, bool]:
    topology = here(dp_shard=2)
    sharded = distribute_tensor(torch.zeros(4), topology.mesh("dense", "fsdp"), [Shard(0)], src_data_rank=None)
    parameter = nn.Parameter(sharded)
    parameter.grad = sharded.clone()
    if topology.rank == 1:
        local(parameter.grad)[0] = math.nan
    clipper = Clipper({"p": parameter}, {"a": 1.0}, topology, 1.0, GradientNorm(p), stop=lambda: topology.rank == 1)
    totals = clipper.clip(StageLoss({"a": torch.ones(())}), tokens=1)
    return bool(totals.finite), bool(totals.stop)


@pytest.mark.thorough
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_one_rank_that_stops_or_is_not_finite_is_known_to_all(world: Any, p: float) -> None:
    assert world(2).run(flagged, p) == [(False, True)] * 2
