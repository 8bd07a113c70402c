"""Choice of the executor of a first pass: the trained model, a frozen copy, or stored outputs. Parts are stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_engine.compose.first_pass import build as module
from d9d_engine.compose.first_pass.build import BuiltFirstPass, build_first_pass
from torch import nn


class TwoPass:
    first_pass = SimpleNamespace(where="task.teacher")
    first_inputs = "first inputs"


@dataclass
class Root:
    job: Any
    selection: Any
    topology: Any
    note: Any


@dataclass
class Forward:
    task: Any
    executor: Any
    mode: Any
    ranks: Any
    draws: bool = False


class Built:
    """A built first pass of a way to run it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by: str, ranks: int = 1) -> None:
        self.notes: list[str] = []
        self.started: list[Any] = []
        self.stored: list[Any] = []
        topology = SimpleNamespace(
            data_parallel_size=ranks,
            data_parallel_rank=ranks - 1,
            axes_group=lambda *axes: axes,
            coordinate={"pp": 1},
            world="world",
        )
        self.root = Root("job", "selection", topology, self.notes.append)
        frozen = SimpleNamespace(model=nn.Linear(3, 2), full_model=nn.Linear(1000, 2))
        self.frozen = frozen
        self.assembly = SimpleNamespace(
            model="model",
            peft="method",
            pipeline=SimpleNamespace(stages=[0, 1, 2], stages_of=[{0}, {1, 2}].__getitem__),
        )
        for name, value in {
            "TwoPassTask": TwoPass,
            "settle_first_pass": lambda chosen, _assembly: by if chosen is TwoPass.first_pass else None,
            "assemble_frozen": lambda root, chosen, how: (Root(f"{how} job", "its selection", topology, None), frozen),
            "start_model": self._start,
            "build_frozen_executor": lambda *given: ("frozen", *given),
            "build_executor": lambda *given: ("own", *given),
            "GroupRanks": lambda *given: given,
            "FirstForward": Forward,
            "stored_outputs": lambda *given: self.stored.append(given) or "runner",
            "split_of": lambda *given: ("split", *given),
            "SwitchesOff": str,
            "_evaluating": lambda *given: ("evaluating", *given),
        }.items():
            monkeypatch.setattr(module, name, value)
        running: Any = ("auxiliary", "tallies", "gradients", "statistics")
        root, assembly, task = (self.root, self.assembly, "task")
        self.task = TwoPass()
        self.found = build_first_pass(root, assembly, task, self.task, running)  # type: ignore[arg-type]
        self.forward: Any = next(value for value in vars(self.found).values() if isinstance(value, Forward))

    def _start(self, root: Any, assembly: Any) -> None:
        self.started.append((root.job, assembly))
        root.note("loaded")


def test_a_task_with_one_pass_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = None
    assert build_first_pass(root, root, root, object(), root) == BuiltFirstPass()


@pytest.mark.parametrize("by", ["copy", "other"])
def test_a_frozen_model_runs_the_first_pass_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    built = Built(monkeypatch, by, ranks=3)
    assert built.started == [(f"{by} job", built.frozen)]
    assert built.notes == ["task.teacher: loaded", "task.teacher: a frozen model of 2,002 parameters"]
    assert not built.frozen.model.training
    forward = built.forward
    assert forward.executor == (
        "frozen", f"{by} job", "its selection", built.frozen, built.root.topology, "task", "first inputs", "world",
    )  # fmt: skip
    assert (forward.mode, forward.ranks, forward.draws) == (nullcontext, (2, 3, ("dp_replicate", "dp_shard")), False)
    assert built.found.model is built.frozen.model


@pytest.mark.parametrize(
    ("by", "draws", "mode"),
    [("model", True, None), ("without_adapter", False, ("evaluating", "model", "method")),
     ("stored", False, ("evaluating", "model"))],
)  # fmt: skip
def test_the_trained_model_runs_the_first_pass_itself(
    monkeypatch: pytest.MonkeyPatch, by: str, draws: bool, mode: Any
) -> None:
    built = Built(monkeypatch, by)
    forward = built.forward
    assert forward.executor == (
        "own", "job", "selection", built.assembly, built.root.topology, "task", "auxiliary", "tallies", "gradients",
        "statistics", "first inputs",
    )  # fmt: skip
    assert (forward.task, forward.ranks, forward.draws) == (built.task, (0, 1, None), draws)
    assert forward.mode is nullcontext if mode is None else forward.mode() == mode
    assert built.notes == []
    stores = [value for value in vars(built.found).values() if callable(value)]
    if by != "stored":
        assert stores == []
        return
    (store,) = stores
    assert store("stream", "data") == "runner"
    assert built.stored == [
        (
            "job", forward, "stream", "data", (0, 1, None), True, built.root.topology, built.root.note,
            ("split", "task", built.root.topology),
        )
    ]  # fmt: skip
