"""A forward and a backward of two stages in turns: the same numbers, a fixed order, and errors that leave nothing."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.program.runner import StepState
from d9d_core.program.text import parse_programs
from d9d_core.schedule import Backward, Forward
from d9d_pipeline.overlap.handlers import OverlapHandlers
from d9d_pipeline.overlap.pair_runner import PairRunner
from d9d_pipeline.overlap.streams import StageStreams
from d9d_pipeline.overlap.yield_points import BlockHook, YieldPoints
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
Log = list[str]


class Probe(torch.autograd.Function):
    """Says when it is passed, and fails if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: Log, fails: set[str]) -> Tensor:
        ctx.name, ctx.log, ctx.fails = name, log, fails
        log.append(f"F{name}")
        if f"F{name}" in fails:
            raise ValueError(f"no forward of {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.log.append(f"B{ctx.name}")
        if f"B{ctx.name}" in ctx.fails:
            raise ValueError(f"no backward of {ctx.name}")
        return grad, None, None, None


class Block(nn.Module):
    def __init__(self, name: str, log: Log, fails: set[str]) -> None:
        super().__init__()
        self.name, self.log, self.fails = name, log, fails
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = Probe.apply(x, self.name, self.log, self.fails)
        return x + self.dropout(self.linear(x).sin())


class Again:
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.forward, x, use_reentrant=False)


class Chain(nn.Module):
    def __init__(self, letter: str, log: Log, fails: set[str], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(f"{letter}{index}", log, fails) for index in range(depth))

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pairs:
    """Two stages, and several pairs of them, with a pair runner or one side after the other."""

    def __init__(
        self, change: Callable[[Chain], None] = lambda _: None, depth: int = 3, device: torch.device = CPU
    ) -> None:
        self.log: Log = []
        self.device = device
        self.fails: set[str] = set()
        torch.manual_seed(0)
        self.stages = {0: Chain("a", self.log, self.fails), 3: Chain("b", self.log, self.fails, depth)}
        self.streams = StageStreams(device, self.stages)
        for stage in self.stages.values():
            change(stage.to(device))

    def runner(self) -> PairRunner:
        return PairRunner(self.stages, self.device)

    def forward(self, stage: int, microbatch: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(100 * stage + microbatch)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(microbatch))
        with self.streams.on(stage):
            x = x.to(self.device).requires_grad_()
            return x, self.stages[stage](x)

    def run(self, run: Callable[[Callable[[], None], Callable[[], None]], None], pairs: int = 3) -> list[Tensor]:
        found = []
        self.streams.fork()
        graphs = {stage: self.forward(stage, 0) for stage in self.stages}
        self.log.clear()
        for microbatch in range(1, pairs + 1):
            for ahead, back in ((0, 3), (3, 0)):
                leaf, out = graphs.pop(back)

                def forward(ahead: int = ahead, microbatch: int = microbatch) -> None:
                    graphs[ahead] = self.forward(ahead, microbatch)
                    found.append(torch.rand(1, device=self.device).cpu())  # where its generator stands

                def backward(leaf: Tensor = leaf, out: Tensor = out, back: int = back) -> None:
                    with self.streams.on(back):
                        out.square().sum().backward()
                    found.append(leaf.grad)

                run(forward, backward)
                found.append(graphs[ahead][1].detach())
        self.streams.join()
        return sorted(found, key=lambda t: (t.numel(), t.flatten()[0].item())) + [
            parameter.grad for stage in self.stages.values() for parameter in stage.parameters()
        ]


def one_after_the_other(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    forward()
    backward()


def checkpoint_some(chain: Chain) -> None:
    for layer in list(chain.layers)[::2]:
        layer.forward = Again(layer.forward)


def compile_all(chain: Chain) -> None:
    for layer in chain.layers:
        layer.forward = Plain(layer.linear)
        layer.compile(backend="aot_eager")


class Plain:
    """Dropout's random numbers are another matter under a compiler."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.linear(x).sin()


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "d9d-backward" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("change", [lambda _: None, checkpoint_some, compile_all], ids=["plain", "again", "compiled"])
@pytest.mark.parametrize("depth", [1, 3, 4])
@devices
def test_a_pair_computes_what_one_after_the_other_computes(
    change: Callable[[Chain], None], depth: int, device: str
) -> None:
    expected = Pairs(change, depth, torch.device(device)).run(one_after_the_other)
    pairs = Pairs(change, depth, torch.device(device))
    runner = pairs.runner()
    found = pairs.run(runner.run)
    runner.close()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@devices
def test_sides_take_turns_at_each_block(device: str) -> None:
    pairs = Pairs(device=torch.device(device))
    pairs.run(pairs.runner().run, pairs=1)
    first = ["Bb2", "Fa0", "Bb1", "Fa1", "Bb0", "Fa2"]
    assert pairs.log[:6] == first
    assert pairs.log[6:] == [step.translate(str.maketrans("ab", "ba")) for step in first]


def test_the_longer_side_goes_on_alone() -> None:
    pairs = Pairs(depth=5)
    pairs.run(pairs.runner().run, pairs=1)
    assert pairs.log[:8] == ["Bb4", "Fa0", "Bb3", "Fa1", "Bb2", "Fa2", "Bb1", "Bb0"]


@devices
def test_a_forward_that_is_computed_again_hands_over_nowhere(device: str) -> None:
    pairs = Pairs(checkpoint_some, device=torch.device(device))
    pairs.run(pairs.runner().run, pairs=1)
    assert pairs.log[:8] == ["Fb2", "Bb2", "Fa0", "Bb1", "Fa1", "Fb0", "Bb0", "Fa2"]


def test_nothing_happens_outside_of_a_pair() -> None:
    pairs = Pairs()
    pairs.runner()
    pairs.run(one_after_the_other, pairs=1)
    assert pairs.log[:6] == ["Fa0", "Fa1", "Fa2", "Bb2", "Bb1", "Bb0"]


def test_stages_keep_their_modules_and_names_and_close_takes_the_points_away() -> None:
    pairs = Pairs(lambda chain: chain.layers[1].compile(backend="eager"))
    before = [(list(s.state_dict()), [(n, type(m)) for n, m in s.named_modules()]) for s in pairs.stages.values()]
    calls = [layer._compiled_call_impl for stage in pairs.stages.values() for layer in stage.layers]
    runner = pairs.runner()
    assert runner.blocks == 6
    after = [(list(s.state_dict()), [(n, type(m)) for n, m in s.named_modules()]) for s in pairs.stages.values()]
    assert after == before
    runner.close()
    layers = [layer for stage in pairs.stages.values() for layer in stage.layers]
    assert [layer._compiled_call_impl for layer in layers] == calls
    assert not any(layer._forward_pre_hooks for layer in layers)


@pytest.mark.parametrize(
    ("where", "log"),
    [
        ("Fa0", ["Bb2", "Fa0"]),
        ("Fa2", ["Bb2", "Fa0", "Bb1", "Fa1", "Bb0", "Fa2"]),
        ("Bb2", ["Bb2"]),
        ("Bb0", ["Bb2", "Fa0", "Bb1", "Fa1", "Bb0"]),
    ],
)
@devices
def test_the_first_error_reaches_the_caller_and_the_other_side_stops_where_it_waits(
    where: str, log: Log, device: str
) -> None:
    pairs = Pairs(device=torch.device(device))
    runner = pairs.runner()

    def run(forward: Callable[[], None], backward: Callable[[], None]) -> None:
        pairs.fails.add(where)
        runner.run(forward, backward)

    with pytest.raises(ValueError, match=f"no {'forward' if where[0] == 'F' else 'backward'} of {where[1:]}") as caught:
        pairs.run(run)
    assert pairs.log == log
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == ("forward" if where[0] == "F" else "backward")
    assert caught.value.__context__ is None
    pairs.fails.clear()
    pairs.run(runner.run)  # a pair runner is not spoilt by it


def test_an_error_before_the_backward_begins_keeps_it_from_beginning() -> None:
    began = []

    def forward() -> None:
        raise KeyError("early")

    with pytest.raises(KeyError, match="early"):
        Pairs().runner().run(forward, lambda: began.append(1))
    assert not began


def test_an_interrupt_ends_both_sides() -> None:
    pairs = Pairs()
    runner = pairs.runner()
    _, out = pairs.forward(3, 0)
    pairs.log.clear()

    def forward() -> None:
        pairs.forward(0, 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(forward, out.sum().backward)
    assert pairs.log == ["Bb2", "Fa0", "Bb1", "Fa1", "Bb0", "Fa2"]


def test_tensors_without_a_backward_have_no_yield_point() -> None:
    points, weight = YieldPoints(), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert points.watched(weight) is weight
    assert points.watched(weight.detach()).grad_fn is None
    assert points.watched(weight) is not weight


def test_an_error_keeps_nothing_alive() -> None:
    pairs = Pairs()
    runner = pairs.runner()
    pairs.fails.add("Bb1")
    _, out = pairs.forward(3, 0)

    def backward(out: Tensor = out) -> None:
        out.sum().backward()

    watched = weakref.ref(out)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no backward of b1"):
            runner.run(lambda: None, backward)
        del out, backward
        assert watched() is None
    finally:
        gc.enable()


def test_a_compiled_block_is_compiled_once_with_points_and_without() -> None:
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def change(chain: Chain) -> None:
        for layer in chain.layers:
            layer.forward = Plain(layer.linear)
            layer.compile(backend=counting)

    torch._dynamo.reset()
    pairs = Pairs(change)
    pairs.run(one_after_the_other)
    without = list(graphs)
    torch._dynamo.reset()
    graphs.clear()
    pairs.run(pairs.runner().run)
    assert graphs == without


def test_a_parameter_that_enters_a_block_collects_no_hooks() -> None:
    weight = nn.Parameter(torch.ones(1))
    hidden = torch.ones(1, requires_grad=True)
    BlockHook(YieldPoints(), forward=False)(None, (weight, hidden), {})
    assert not weight._backward_hooks
    assert hidden._backward_hooks


def test_streams_do_nothing_without_a_gpu() -> None:
    streams = StageStreams(CPU, (0, 3))
    streams.fork()
    with streams.on(3):
        x = torch.ones(2)
    streams.handoff([x], 3, 0, streams.mark(3))
    streams.handoff([x], None, 0)
    streams.join()
    assert x.sum() == 2


def test_streams_fork_before_the_first_action_of_a_step_and_join_once_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(StageStreams, "fork", lambda _self: done.append("fork"))
    monkeypatch.setattr(StageStreams, "join", lambda _self: done.append("join"))
    runner: Any = SimpleNamespace(stages={}, topology=SimpleNamespace(device=CPU))
    pairs = OverlapHandlers(runner, {Forward: lambda action, _state: done.append(str(action))})
    ((first, second),) = parse_programs("F0.0 F0.1")
    for step in range(2):
        state = StepState(step, [], {})
        pairs.on_stream(first, state)
        pairs.on_stream(second, state)
        for end in state.ends:
            end()
    assert done == ["fork", "F0.0", "F0.1", "join"] * 2


def test_a_pair_runs_its_forward_and_its_backward_as_actions_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str, int]] = []
    runner: Any = SimpleNamespace(stages={}, topology=SimpleNamespace(device=CPU))
    note: Any = lambda action, state: done.append((side[-1], str(action), state.step))  # noqa: E731
    pairs = OverlapHandlers(runner, {Forward: note, Backward: note})
    side: list[str] = []

    def run(forward: Callable[[], None], backward: Callable[[], None]) -> None:
        for name, part in (("forward", forward), ("backward", backward)):
            side.append(name)
            part()

    monkeypatch.setattr(pairs, "_pair_runner", SimpleNamespace(run=run))
    ((pair,),) = parse_programs("F0.1+B3.0")
    pairs.overlap(pair, StepState(7, [], {}))
    assert done == [("forward", "F0.1", 7), ("backward", "B3.0", 7)]
