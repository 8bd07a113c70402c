"""What ops are told while the actions of a stage run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.config import PluginConfig
from d9d_core.program.runner import StageRunner, StepState, Visit
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    Overlap,
    Program,
    ReceiveActivation,
    SendActivation,
    WeightBackward,
)
from d9d_pipeline.overlap.handlers import OverlapHandlers
from d9d_pipeline.overlap.streams import StageStreams
from d9d_pipeline.runtime import handlers as module
from d9d_pipeline.runtime.handlers import SplitBackwardHandlers
from d9d_testing.toy.deferring import Deferring
from torch import nn

PROGRAM: Program = (Forward(0, 0), Forward(0, 1), Backward(0, 0), InputBackward(0, 1), WeightBackward(0, 1))


class Recorder:
    """A runner of one stage that notes what its ops would see."""

    def __init__(self) -> None:
        self.layer = Deferring(2)
        self.stages = {0: self.layer}
        self.unsplittable: frozenset[str] = frozenset()
        self.seen: list[bool] = []

    def _note(self, *_: object) -> None:
        assert self.layer.deferral is not None
        self.seen.append(self.layer.deferral.wanted)

    forward = backward = close_backward = after_weights = _note

    def open_backward(self, *_: object) -> tuple[Visit, list[Any]]:
        self._note()
        return Visit({}, {}, {}), []


def test_ops_defer_only_where_the_backward_comes_in_two_phases() -> None:
    recorder = Recorder()
    handlers = SplitBackwardHandlers(cast("StageRunner", recorder)).handlers()
    state = StepState(0, [{"tokens": torch.zeros(1)}] * 2, {}, split={0: frozenset({1})})
    for action in PROGRAM:
        handlers[type(action)](action, state)
    first, second, whole, *split = recorder.seen
    assert (first, second, whole) == (False, True, False)
    assert split == [True] * 3


def test_an_evaluation_defers_nothing() -> None:
    recorder = Recorder()
    state = StepState(0, [{"tokens": torch.zeros(1)}] * 2, {}, evaluated=lambda _outputs, _microbatch: None)
    SplitBackwardHandlers(cast("StageRunner", recorder)).handlers()[Forward](Forward(0, 1), state)
    assert recorder.seen == [False]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_rank_has_the_handlers_of_its_programs(
    monkeypatch: pytest.MonkeyPatch, ranks: int, splits: bool, pairs: bool
) -> None:
    kinds = (
        {Forward, Backward} | ({InputBackward, WeightBackward} if splits else set()) | ({Overlap} if pairs else set())
    )
    runner: Any = Recorder()
    runner.pipeline = SimpleNamespace(ranks=ranks, kinds=kinds)
    sends = {SendActivation: print, ReceiveActivation: print}
    monkeypatch.setattr(module, "Transfers", lambda _runner: SimpleNamespace(handlers=lambda: sends))
    found = module.handlers(cast("PluginConfig", None), runner)
    assert found.keys() == kinds | (sends.keys() if ranks > 1 else set())
    owner = getattr(found[Forward], "__self__", None)
    assert isinstance(owner, SplitBackwardHandlers) if splits else owner is runner


def test_what_goes_to_another_stage_of_the_rank_crosses_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: list[tuple[int | None, int | None]] = []
    monkeypatch.setattr(
        StageStreams, "handoff", lambda _self, _tensors, source, target, _made: crossed.append((source, target))
    )

    def compute(action: Action, state: StepState) -> None:
        (state.inputs if isinstance(action, Forward) else state.gradients)[
            action.stage + (1 if isinstance(action, Forward) else -1), 0
        ] = dict

    runner = SimpleNamespace(
        stages={1: nn.Linear(1, 1), 2: nn.Linear(1, 1)}, topology=SimpleNamespace(device=torch.device("cpu"))
    )
    pairs = OverlapHandlers(cast("StageRunner", runner), {Forward: compute, Backward: compute})
    state = StepState(0, [], {})
    for action in (Forward(1, 0), Forward(2, 0), Backward(2, 0), Backward(1, 0)):
        pairs.on_stream(action, state)
    for arrival in (*state.inputs.values(), *state.gradients.values()):
        arrival()
    assert crossed == [(1, 2), (2, 1)]  # stages 0 and 3 are on other ranks
