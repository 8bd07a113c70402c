"""The toy strategy, schedule, tracker and layer, and the counter of operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.model import Stage
from d9d_core.schedule import Backward, Reduce, single_stage
from d9d_core.tracker import RunInfo
from d9d_testing.operators import OperatorCounter
from d9d_testing.toy.config import ToyLinearsConfig, ToyPeftConfig, ToyScheduleConfig, ToyTrackerConfig
from d9d_testing.toy.deferring import Deferring
from d9d_testing.toy.linears import build
from d9d_testing.toy.modifiers import ToyPeft, ToySchedule, ToyStrategy
from d9d_testing.toy.observers import ToyTracker
from torch import nn


def test_operators_are_counted_by_name_and_run() -> None:
    counter = OperatorCounter()
    with counter:
        x = torch.ones(2, 3) @ torch.ones(3, 2)
        total = x.sum(0, keepdim=True) + x.sum()
    assert total.tolist() == [[18.0, 18.0]]
    assert counter.counts["aten.mm"] == 1
    assert counter.counts["aten.sum"] == 2
    assert counter.__torch_dispatch__(torch.ops.aten.mm.default, (), (torch.ones(1, 2), torch.ones(2, 1))) == 2
    assert counter.counts["aten.mm"] == 2


@pytest.mark.parametrize(("blocks", "applied"), [({}, 1), ({"blocks": 2}, 2), ({"blocks": 0}, 0)])
def test_the_toy_strategy_halves_the_first_blocks(blocks: dict[str, int], applied: int) -> None:
    model = build(ToyLinearsConfig(features=3, blocks=3), Stage())
    x = torch.randn(4, 3)
    found = ToyStrategy(SimpleNamespace(**blocks)).apply(model, None)  # type: ignore[arg-type]
    assert found.modules == tuple(f"layers.{number}" for number in range(applied))
    expected = x
    for number, block in enumerate(model.layers.values()):  # type: ignore[union-attr, operator]
        expected = (expected + torch.tanh(block.linear(expected))) * (0.5 if number < applied else 1)
    assert torch.equal(model(x=x)["y"], expected)


def test_the_toy_method_trains_what_it_is_told_and_merges_visibly() -> None:
    method = ToyPeft(ToyPeftConfig(trains=("a", "b")))
    module = nn.Module()
    module.register_buffer("scale", torch.ones(()))
    module.register_buffer("other", torch.ones(()))
    assert method.inject(module) == {"a", "b"}
    method.merge(module)
    assert {name: buffer.item() for name, buffer in module.named_buffers()} == {"scale": 2.0, "other": 1.0}


def test_the_toy_schedule_forgets_what_it_is_told() -> None:
    ((*whole,),) = single_stage(1, 2)
    for forgets, kinds in (("nothing", ()), ("backward", (Backward,)), ("reduce", (Reduce,))):
        (program,) = ToySchedule(ToyScheduleConfig(forgets=forgets))(1, 2)  # type: ignore[arg-type]
        assert list(program) == [action for action in whole if type(action) not in kinds]
        assert (len(program) < len(whole)) == bool(kinds)


def test_the_toy_tracker_notes_its_calls_and_fails_in_one(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    tracker = ToyTracker(ToyTrackerConfig(path=path, fails_in="flush"))
    run = tracker.open(RunInfo("mine", tmp_path, "", {}, 10, 4), {"id": "toy-1"})
    run.write(5, {"a": 1.0, "b": 2.0})
    with pytest.raises(OSError, match="connection lost"):
        run.flush()
    run.close("failed")
    assert run.state() == {"id": "toy-1"}
    assert path.read_text() == "open mine at 4 with {'id': 'toy-1'}\nwrite 5: 2 values\nflush \nclose failed\n"


@pytest.mark.parametrize("of_input", [True, False])
def test_a_deferring_layer_hands_over_the_gradient_of_its_weight(of_input: bool) -> None:
    layer, x, grad = Deferring(3), torch.randn(2, 3, requires_grad=of_input), torch.randn(2, 3)
    plain = x.detach() @ layer.weight.detach()
    layer(x).backward(grad)
    assert layer.weight.grad is not None
    own, layer.weight.grad = layer.weight.grad, None
    of_x, x.grad = x.grad, None
    added: list[Any] = []
    deferral: Any = SimpleNamespace(wanted=True, add=lambda _edge, compute: added.append(compute))
    assert layer.defer_to(deferral) == ("weight",)
    out = layer(x)
    assert torch.equal(out, plain)
    out.backward(grad)
    assert layer.weight.grad is None
    (compute,) = added
    torch.testing.assert_close(compute(), own)
    if of_input:
        torch.testing.assert_close(x.grad, of_x)
    deferral.wanted = False
    layer(x).backward(grad)
    torch.testing.assert_close(layer.weight.grad, own)
    assert len(added) == 1
