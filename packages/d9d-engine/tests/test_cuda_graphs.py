"""Layouts that allow blocks to be recorded as CUDA graphs; that they compute the same is a test on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.plugin import Ref, StrategySpec
from d9d_core.program.placement import Pipeline
from d9d_core.strategy import Applied, GradientOwner
from d9d_engine.compose.parts.cuda_graphs import check_cuda_graphs, records_graphs, step_mark

pytestmark = pytest.mark.smoke


def chosen(name: str, anchor: str) -> Any:
    spec = StrategySpec(name=name, summary="One.", config=Ref("a:B"), build=Ref("a:C"), anchor=anchor)
    return SimpleNamespace(where=f"parallel[{anchor}]", spec=spec)


RECORDING = (chosen("compile", "compile"), Applied(("layers.0",), cuda_graphs=True))
OWNED = Applied(("",), (GradientOwner("weight", "dp_shard", "fsdp"),))


def check(*others: tuple[Any, Applied], device: str | None = "cuda", stages: Sequence[int] = (0,)) -> None:
    check_cuda_graphs([RECORDING, *others], Pipeline(hosts=tuple(stages)), device)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: check(device="cpu"), "needs CUDA, and the model is on cpu"),
        (lambda: check(device="mps"), "needs CUDA, and the model is on mps"),
        (lambda: check(stages=(0, 1)), "2 pipeline stages"),
        (lambda: check((chosen("fsdp", "data"), OWNED)), r"parallel\[data\] \(fsdp\) gathers or copies the parameters"),
        (lambda: check((chosen("mine", "data"), Applied(("",), reducers=(object(),)))), r"\(mine\) gathers"),
        (lambda: check((chosen("far", "data"), Applied(("",), on_host=frozenset({"weight"})))), "host memory"),
        (lambda: check((chosen("tp", "tensor"), Applied(("",)))), r"\(tp\) communicates"),
        (lambda: check((chosen("cp", "context"), Applied(("",)))), r"\(cp\) communicates"),
        (lambda: check((chosen("experts", "expert"), Applied(("",)))), r"\(experts\) communicates"),
    ],
)
def test_layouts_in_which_a_replay_would_be_wrong_are_refused(refused: Callable[[], None], why: str) -> None:
    with pytest.raises(BuildError, match=why) as caught:
        refused()
    message = str(caught.value)
    assert message.startswith("parallel[compile]: strategy 'compile' is to capture CUDA graphs, but ")
    assert "remove 'cudagraphs: true'" in message


def test_other_layouts_are_allowed() -> None:
    check()
    check(device=None)  # not known yet: the job is planned for another machine
    check((chosen("recompute", "checkpointing"), Applied(("layers.0",))))
    summed = Applied(("",), (GradientOwner("weight", "dp_replicate", "sync"),))  # by core, as of `replicate`
    check((chosen("mine", "data"), summed))


def test_nothing_is_refused_where_nothing_is_recorded() -> None:
    applied = [(chosen("compile", "compile"), Applied(("layers.0",))), (chosen("fsdp", "data"), OWNED)]
    assert not records_graphs(applied)
    check_cuda_graphs(applied, Pipeline(hosts=(0, 1)), "cpu")


def test_steps_are_marked_from_the_build_on_if_modules_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    step_mark([])()
    assert not marks
    mark = step_mark([RECORDING])
    assert len(marks) == 1
    mark()
    assert len(marks) == 2
