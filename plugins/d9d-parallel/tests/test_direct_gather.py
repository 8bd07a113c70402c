"""All-gathers into parameters and sums of gradients where they are: which units do that, and the numbers of FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_engine.distributed.mesh import Topology
from d9d_parallel.data_parallel import strategy
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig
from d9d_parallel.data_parallel.direct_gather import DirectGather
from d9d_parallel.data_parallel.strategy import Fsdp, Hsdp
from d9d_testing.operators import OperatorCounter
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.smoke
VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
STRATEGIES = {"fsdp": (Fsdp, FsdpConfig), "hsdp": (Hsdp, HsdpConfig)}


class Block(nn.Module):
    """Two parameters, one of which may not be split evenly, and a frozen one in a format of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width, bias=False)
        self.outer = nn.Linear(width, 4, bias=False)
        self.shift = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) + self.shift.to(x.dtype)


class Model(nn.Module):
    """Blocks, of which the last may be left out, between two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(4, 4, bias=False)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor, layers: int = 3) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:layers]:
            x = layer(x)
        return self.head(x)


def wrapped(case: Mapping[str, Any], direct: bool = True) -> Model:
    torch.manual_seed(1)
    model = Model(case.get("width", 8))
    kind, config = STRATEGIES[case.get("name", "fsdp")]
    sizes = Mesh(**case.get("mesh", {"dp_shard": 2})).sizes()
    topology = Topology(sizes=sizes, rank=dist.get_rank(), world_size=dist.get_world_size(), views=VIEWS)
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(strategy, "gather_directly", lambda _stage: [])  # nor does anything reduce directly then
        kind(config(**case.get("settings", {}))).apply(model, topology)
    return model


def steps_of(case: Mapping[str, Any], direct: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Outputs and whole gradients of training steps with an evaluation between them, and counts of operators."""
    model = wrapped(case, direct)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    found: list[Tensor] = []
    with OperatorCounter() as seen:
        for layers in case.get("layers", (3, 3)):
            for microbatch in range(2):
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * microbatch + dist.get_rank()))
                output = model(x, layers)
                output.square().sum().backward()
                found.append(output.detach())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found += [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]
            with torch.no_grad():
                found.append(model(torch.ones(2, 4), layers))
            optimizer.step()
            optimizer.zero_grad()
    return found, {name.rpartition(".")[2]: count for name, count in seen.counts.items()}


def compared(cases: list[dict[str, Any]]) -> list[tuple[bool, dict[str, int]]]:
    """Whether numbers have the same bits as with FSDP2's own gathers, and counts of operators."""
    answers = []
    for case in cases:
        (ours, counts), (theirs, _) = steps_of(case, direct=True), steps_of(case, direct=False)
        answers.append((len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)), counts))
    return answers


GATHER, COPY_IN, COPY_OUT = "allgather_into_tensor_coalesced_", "all_gather_copy_in", "split_with_sizes_copy"
REDUCE, REDUCE_BUFFER = "reduce_scatter_tensor_coalesced_", "_reduce_scatter_base_"


def test_nothing_is_copied_where_shards_are_even(world: Any) -> None:
    for ((same, counts),) in world(2).run(compared, [{"layers": (3,)}]):
        assert same
        assert counts[REDUCE] == 2 * 4  # microbatches and units; both parameters of a block in one call
        assert counts[GATHER] > 0
        assert not {COPY_IN, COPY_OUT, REDUCE_BUFFER} & counts.keys()


@pytest.mark.thorough
def test_nothing_is_copied_in_any_order_of_gathers_and_numbers_stay_the_same(world: Any) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"settings": {"reshard_after_forward": False}},
        {"settings": {"forward_prefetch": 2, "backward_prefetch": 2}},
        {"settings": {"defer": "everything"}},
        {"layers": (2, 3, 2, 3)},  # a block that was requested ahead and did not run gathers anew in the next step
    ]
    for found in world(2).run(compared, cases):
        for (same, counts), case in zip(found, cases, strict=True):
            assert same, case
            assert counts[GATHER] > 0, case
            assert counts[REDUCE] > 0, case
            assert not {COPY_IN, COPY_OUT, REDUCE_BUFFER} & counts.keys(), case


@pytest.mark.thorough
def test_gradients_that_change_their_format_are_summed_in_a_buffer(world: Any) -> None:
    settings = [{"compute_dtype": "bfloat16"}, {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}]
    for found in world(2).run(compared, [{"settings": one} for one in settings]):
        for same, counts in found:
            assert same
            assert counts[GATHER] > 0
            assert REDUCE not in counts
            assert not {COPY_IN, COPY_OUT} & counts.keys()


@pytest.mark.thorough
def test_units_that_cannot_gather_directly_go_the_way_of_fsdp2(world: Any) -> None:
    (uneven,) = {str(found) for found in world(2).run(ways, {"width": 5})}
    assert uneven == str({"": True, "layers.0": False, "layers.1": False, "layers.2": False})
    for found in world(2).run(compared, [{"width": 5}]):
        ((same, counts),) = found
        assert same
        assert counts[GATHER] > 0
        assert counts[COPY_OUT] > 0


def ways(case: dict[str, Any]) -> dict[str, bool]:
    """Whether each unit gathers directly."""
    model = wrapped(case)
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    groups = {name: unit._get_fsdp_state()._fsdp_param_group for name, unit in units.items()}
    return {name: isinstance(group.unshard.__self__, DirectGather) for name, group in groups.items()}


@pytest.mark.full
def test_replicas_of_shards_and_groups_of_ranks_within_them_gather_directly(world: Any) -> None:
    hybrid = {"name": "hsdp", "mesh": {"dp_replicate": 2, "dp_shard": 2}}
    near = {"mesh": {"dp_shard": 4}, "settings": {"reshard_after_forward": 2}}
    for found in world(4).run(compared, [hybrid, near]):
        (same, counts), (same_near, near_counts) = found
        assert same
        assert same_near
        assert COPY_OUT not in counts
        assert REDUCE not in counts  # sums over replicas come after those to shards
        assert near_counts[GATHER] > 0
        assert near_counts[COPY_OUT] > 0  # in the backward, among two


def left_behind(train: bool) -> list[int]:
    """Bytes of whole parameters of a block that was requested and did not run: at the end of the forward, and after."""
    model = wrapped({})
    group = model.layers[2]._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]

    def held() -> int:
        return sum(t.untyped_storage().size() for p in group.fsdp_params for t in p.all_gather_outputs)

    found: list[int] = []
    model.head.register_forward_pre_hook(lambda *_: found.append(held()))
    with torch.set_grad_enabled(train):
        loss = model(torch.ones(2, 4), 2).sum()
    if train:
        loss.backward()
    assert group._all_gather_result is None
    return [*found, held()]


def test_what_was_requested_and_not_used_is_freed(world: Any) -> None:
    whole = 2 * 8 * 4 * 4 + 4 * 8
    for train in (True, False):
        assert world(2).run(left_behind, train) == [[whole, 0]] * 2


def test_the_private_parts_of_torch_are_where_they_were(world: Any) -> None:
    for found in world(2).run(ways, {}):
        assert all(found.values())


def streams() -> list[tuple[bool, str]]:
    """Arguments of the requests for streams of gathers in a step, without repetitions."""
    model = wrapped({})
    shared = model._get_fsdp_state()._comm_ctx  # type: ignore[operator]
    chosen, asked = shared.get_all_gather_streams, []

    def noted(async_op: bool, state: Any) -> Any:
        asked.append((async_op, state.name))
        return chosen(async_op, state)

    shared.get_all_gather_streams = noted
    model(torch.ones(2, 4)).sum().backward()
    return sorted(set(asked))


def test_gathers_have_streams_of_their_own_in_forward_and_backward(world: Any) -> None:
    assert world(2).run(streams) == [[(False, "FORWARD"), (False, "PRE_BACKWARD")]] * 2


def test_parameters_in_the_hosts_memory_are_gathered_by_fsdp2(world: Any) -> None:
    for found in world(2).run(ways, {"settings": {"offload": True}}):
        assert not any(found.values())
