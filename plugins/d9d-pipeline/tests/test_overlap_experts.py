"""Pairs of stages that send tokens to experts on other ranks, or are sharded: same numbers, one order on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.config import PluginConfig
from d9d_core.schedule import Overlap
from d9d_pipeline.overlap.handlers import OverlapHandlers
from d9d_pipeline.overlap.pair_runner import PairRunner
from d9d_pipeline.overlap.yielding_dispatcher import YieldingDispatcher
from d9d_pipeline.runtime.handlers import SequentialPairs, handlers
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

pytest.importorskip("d9d_moe", reason="sends tokens to experts")
pytest.importorskip("d9d_nn", reason="one of them is shared")

HIDDEN, EXPERTS = 8, 8
CPU = torch.device("cpu")


class Spread(nn.Module):
    """Layer whose experts are on other ranks, if there are any."""

    def __init__(self, group: object) -> None:
        super().__init__()
        self.dispatcher = SimpleNamespace(group=group, dispatch=None, combine=None)

    def expert_banks(self) -> dict[str, nn.Module]:
        return {}


@pytest.mark.parametrize(("layer", "overlaps"), [(nn.Linear(2, 2), False), (Spread(None), False), (Spread("ep"), True)])
def test_pairs_run_at_once_where_there_is_communication_to_hide(layer: nn.Module, overlaps: bool) -> None:
    runner: Any = SimpleNamespace(
        forward=None,
        backward=None,
        stages={0: nn.Sequential(layer)},
        pipeline=SimpleNamespace(ranks=1, kinds={Overlap}),
        topology=SimpleNamespace(device=CPU),
    )
    pair: Any = handlers(PluginConfig(name="dual_pipe_v"), runner)[Overlap]
    assert isinstance(pair.__self__, OverlapHandlers if overlaps else SequentialPairs)


def test_only_layers_with_experts_on_other_ranks_yield_where_they_send() -> None:
    near, far = Spread(None), Spread("ep")
    dispatchers = near.dispatcher, far.dispatcher
    runner = PairRunner({0: nn.Sequential(near, far)}, CPU)
    assert near.dispatcher is dispatchers[0]
    assert isinstance(far.dispatcher, YieldingDispatcher)
    runner.close()
    assert (near.dispatcher, far.dispatcher) == dispatchers


class Block(nn.Module):
    """``x + moe(x)``, or a dense layer."""

    def __init__(self, dispatcher: Any, *, shared: bool, capacity: float | None) -> None:
        from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
        from d9d_moe.experts.layer import MoELayer
        from d9d_moe.router.top_k import TopKRouter
        from d9d_nn.swiglu import SwiGLU

        super().__init__()
        self.mixer = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(
            TopKRouter(HIDDEN, EXPERTS, 2, std=0.5, capacity=capacity),
            GroupedSwiGLU(HIDDEN, 8, EXPERTS, std=0.3, output_std=0.3),
            dispatcher,
            shared_expert=SwiGLU(HIDDEN, 8, std=0.3, output_std=0.3) if shared else None,
        )
        local = EXPERTS // dist.get_world_size()
        for name, bank in list(self.moe.experts.named_parameters()):
            mine = bank.detach()[dist.get_rank() * local :][:local].clone()
            setattr(self.moe.experts, name, nn.Parameter(mine))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x).sin()
        return x + self.moe(x)


class Chain(nn.Module):
    def __init__(self, dispatcher: Any, depth: int, capacity: float | None) -> None:
        super().__init__()
        blocks = (Block(dispatcher, shared=index == 1, capacity=capacity) for index in range(depth))
        self.layers = nn.ModuleList(blocks)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Again:
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.forward, x, use_reentrant=False)


def one_after_the_other(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


class Trace:
    """The collectives of a process in order, and who started them."""

    NAMES = {
        "all_to_all_single": "exchange",
        "all_gather_single": "gather",
        "reduce_scatter_single": "reduce",
        # what FSDP2 of torch 2.11 calls
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "reduce",
    }

    def __init__(self) -> None:
        self.log: list[str] = []
        self._originals = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}

    def __enter__(self) -> list[str]:
        for name, original in self._originals.items():
            setattr(dist, name, self._tracing(name, original))
        return self.log

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _tracing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            side = "F" if threading.current_thread() is threading.main_thread() else "B"
            self.log.append(f"{side} {self.NAMES[name]} {tensor.dtype} {tuple(tensor.shape[1:])}")
            return original(*args, **kwargs)

        return traced


def outcome(
    stages: Mapping[int, nn.Module], run: Callable[[Callable[[], None], Callable[[], None]], None], rank: int
) -> list[Tensor]:
    """Of some pairs; graphs, outputs and gradients."""
    found: list[Tensor] = []

    def made(stage: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(microbatch + 10 * stage + 100 * rank)
        x = torch.randn(2, 5 + microbatch % 2, HIDDEN, generator=generator).requires_grad_()
        return x, stages[stage](x)

    graphs = {stage: made(stage, 0) for stage in stages}
    for microbatch in (1, 2):
        for ahead, back in ((0, 1), (1, 0)):
            leaf, out = graphs.pop(back)

            def forward(ahead: int = ahead, microbatch: int = microbatch) -> None:
                graphs[ahead] = made(ahead, microbatch)

            run(forward, out.square().sum().backward)
            found += [graphs[ahead][1].detach(), leaf.grad]
    return found


def experts(change: str, capacity: float | None) -> dict[str, Any]:
    from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher

    def stages() -> dict[int, nn.Module]:
        torch.manual_seed(0)
        made: dict[int, nn.Module] = {
            index: Chain(AllToAllDispatcher(dist.group.WORLD, EXPERTS), depth, capacity)
            for index, depth in enumerate((1, 1) if change == "compiled" else (2, 3))
        }
        for layer in (layer for stage in made.values() for layer in stage.blocks().values()):
            if change == "again":
                layer.forward = Again(layer.forward)
            elif change == "compiled":
                layer.compile(backend="aot_eager")
        return made

    def gradients(made: Mapping[int, nn.Module]) -> list[Tensor]:
        return [parameter.grad for stage in made.values() for parameter in stage.parameters()]

    rank, single = dist.get_rank(), stages()
    expected = outcome(single, one_after_the_other, rank) + gradients(single)
    traces, same = [], []
    for _ in range(1 if change == "compiled" else 2):
        paired = stages()
        runner = PairRunner(paired, CPU)
        with Trace() as log:
            found = outcome(paired, runner.run, rank) + gradients(paired)
        runner.close()
        traces.append(list(log))
        same.append([torch.equal(one, other) for one, other in zip(found, expected, strict=True)])
    return {"traces": traces, "same": same}


@pytest.mark.full
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize(
    ("ranks", "change", "capacity"),
    [
        (2, "plain", None),
        (4, "plain", None),
        (4, "plain", 1.0),
        (4, "again", None),
        pytest.param(2, "compiled", None, marks=pytest.mark.slow),
    ],
)
def test_pairs_with_experts_on_several_ranks_compute_the_same_in_one_order(
    world: type[World], ranks: int, change: str, capacity: float | None
) -> None:
    found = world(ranks).run(experts, change, capacity)
    assert all(all(same) for rank in found for same in rank["same"])
    traces = [trace for rank in found for trace in rank["traces"]]
    assert all(trace == traces[0] for trace in traces)
    sides = "".join(step[0] for step in traces[0])
    if change == "compiled":
        first = 2 * 4  # a forward of each stage, outside of pairs
        assert sides[first:] == "FBFFBBF" * 4  # points inside of blocks work too; one block, four pairs
    assert sides.count("FB") >= 4 * 2


def turns() -> list[str]:
    """What rank 0 starts to send in one pair."""
    from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher

    stages = {index: Chain(AllToAllDispatcher(dist.group.WORLD, EXPERTS), 2, None) for index in range(2)}
    for layer in stages[0].layers:
        layer.moe.shared_expert = None
    runner = PairRunner(stages, CPU)
    x = torch.randn(1, 4, HIDDEN).requires_grad_()
    out = stages[1](x)
    with Trace() as trace:
        runner.run(lambda: stages[0](x.detach().requires_grad_()), out.sum().backward)
    counts = f"({1 + EXPERTS // 2},)"  # of tokens, and of each expert of a rank
    names = {counts: "counts", "(2,)": "label gradients", f"({HIDDEN},)": "tokens", "(4,)": "labels"}
    return [f"{step[0]} {names[step[step.index('(') :]]}" for step in trace]


@pytest.mark.thorough
def test_each_side_sends_in_turn(world: type[World]) -> None:
    log = world(2).run(turns)[0]
    per_block = [
        "F counts",
        "B tokens",  # gradients of a combine's outputs
        "F tokens",
        "F labels",
        "B tokens",  # gradients of a dispatch's outputs
        "B label gradients",
        "F tokens",  # combine
    ]
    assert log == per_block * 2


# --- sharded parameters -----------------------------------------------------------------------------------------------


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
        return x * self.scale


def sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def stages() -> dict[int, nn.Module]:
        torch.manual_seed(0)
        made: dict[int, nn.Module] = {index: Dense() for index in range(2)}
        for stage in made.values():
            for layer in stage.layers:
                fully_shard(layer)
            fully_shard(stage)
        return made

    def reduced(made: Mapping[int, nn.Module]) -> list[Tensor]:
        for unit in (unit for stage in made.values() for unit in stage.modules() if isinstance(unit, FSDPModule)):
            unit.reshard()  # a forward without a backward left whole parameters
        return [parameter.grad.to_local() for stage in made.values() for parameter in stage.parameters()]

    rank, single, paired = dist.get_rank(), stages(), stages()
    expected = outcome(single, one_after_the_other, rank) + reduced(single)
    runner = PairRunner(paired, CPU)
    with Trace() as log:
        found = outcome(paired, runner.run, rank) + reduced(paired)
    return {"trace": log, "same": [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]}


@pytest.mark.thorough
def test_pairs_of_sharded_stages_reduce_before_they_hand_over(world: type[World]) -> None:
    found = world(2).run(sharded)
    assert all(all(rank["same"]) for rank in found)
    assert found[0]["trace"] == found[1]["trace"]
    steps = [step.split()[0] + " " + step.split()[1] for step in found[0]["trace"]]
    reductions = [index for index, step in enumerate(steps) if step == "B reduce"]
    assert len(reductions) == 4 * 3  # pairs, units
    # The forward gathers its second block between the reductions of the backward's two blocks.
    assert "F gather" in steps[reductions[0] : reductions[1]]
