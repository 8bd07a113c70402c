"""Checks of the values that a task returns, and its optional methods. Tasks are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, JobError
from d9d_core.plugin import Ref, TaskSpec
from d9d_core.task import StageInputs
from d9d_engine.step import checked_task as module
from d9d_engine.step.checked_task import CheckedTask

SCALAR, VECTOR = torch.tensor(1.0), torch.ones(2)


class Entry(SimpleNamespace):
    def __str__(self) -> str:
        return "'t' (acme)"


def chosen(observes: set[str] | None = None) -> Any:
    ref = Ref("nowhere:x")
    spec = TaskSpec(name="t", summary="x", config=ref, build=ref, observes=observes)
    return SimpleNamespace(where="task", entry=Entry(kind=SimpleNamespace(name="task")), spec=spec)


class Task:
    """Task that returns the given values and counts its calls."""

    def __init__(self, **values: Any) -> None:
        self.values = {"count": 3, "inputs": StageInputs(first={}), **values}
        self.coefficients = {"a": 1.0, "b": 2.0}
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name not in ("count", "weights", "inputs", "losses", "observations", "check"):
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            self.calls += 1
            return self.values[name]

        return call


def checked(observes: set[str] | None = None, **values: Any) -> Any:
    return CheckedTask(chosen(observes), Task(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "value", "said"),
    [
        ("count", 3, None),
        ("count", SCALAR, None),
        ("count", VECTOR, r"count\(\) returned a tensor \[2\]; return a 0-d tensor"),
        ("count", 3.5, r"count\(\) returned a float, not Integral"),
        ("count", True, r"count\(\) returned a bool, not Integral"),
        ("weights", {"a": SCALAR, "b": SCALAR, "c": VECTOR}, None),
        ("weights", {"a": SCALAR}, r"weights\(\) lacks the loss terms b, which are in its coefficients"),
        ("weights", {"a": SCALAR, "b": VECTOR}, r"weights\(\) gives 'b' of shape \[2\]; return a 0-d tensor"),
        ("weights", {"a": SCALAR, "b": 1.0}, r"weights\(\), for 'b', returned a float, not Tensor"),
        ("losses", {"b": SCALAR}, r"losses\(\) lacks the loss terms a, which"),
        ("inputs", StageInputs(first={}), None),
        ("inputs", {}, r"inputs\(\) returned a dict, not StageInputs"),
        ("observations", {"x": VECTOR, "y": SCALAR}, None),
        ("observations", {"y": SCALAR}, r"observations\(\) lacks x, which its record declares with 'observes'"),
        ("observations", [], r"observations\(\) returned a list, not Mapping"),
    ],
)
def test_values_of_a_task_are_checked_at_the_first_call(call: str, value: Any, said: str | None) -> None:
    task = checked({"x"}, **{call: value})
    given = ({}, {}) if call in ("losses", "observations") else ({},)
    if said is not None:
        with pytest.raises(BuildError, match=f"^task: task 't' .acme.: {said}"):
            getattr(task, call)(*given)
        return
    assert getattr(task, call)(*given) is value
    task._task.values[call] = "unchecked from now on"
    assert getattr(task, call)(*given) == "unchecked from now on"
    assert task._task.calls == 2


def test_a_task_without_declared_observations_may_observe_anything() -> None:
    assert checked(None, observations={}).observations({}, {}) == {}


class Weighs(Task):
    def weight(self, outputs: Any, microbatch: Any) -> Any:
        return self.values["weight"]


def test_a_task_that_weighs_outputs_has_one_loss_term_and_a_scalar_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WeighsOutputs", Weighs)

    def made(coefficients: dict[str, float], weight: Any = SCALAR) -> Any:
        task = Weighs(weight=weight, weights={"a": VECTOR})
        task.coefficients = coefficients
        return CheckedTask(chosen(), task)  # type: ignore[arg-type]

    for coefficients, terms in (({"a": 1.0, "b": 1.0}, "a, b"), ({}, "none")):
        with pytest.raises(BuildError, match=f"which allows exactly one loss term, but coefficients has: {terms};"):
            made(coefficients)
    task = made({"a": 1.0})
    assert task.late
    assert task.weigh({}, {}) == {"a": SCALAR}
    with pytest.raises(BuildError, match=r"weight\(\) returned a tensor \[2\]; return a 0-d tensor"):
        made({"a": 1.0}, VECTOR).weigh({}, {})
    with pytest.raises(BuildError, match=r"weight\(\) returned a float; return a 0-d tensor"):
        made({"a": 1.0}, 1.0).weigh({}, {})
    plain = checked(weights={"a": SCALAR, "b": SCALAR})
    assert not plain.late
    assert plain.weigh({}, {}) == {"a": SCALAR, "b": SCALAR}


def test_optional_methods_of_a_task_are_called_if_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    class Full(Task):
        def begin_step(self, step: int) -> None:
            did.append(("step", step))

        def finalize(self) -> None:
            did.append("end")

        def hparams(self) -> Any:
            return {"x": 1}

        def metrics(self) -> Any:
            return {"m": "metric"}

        def split_positions(self, microbatch: Any, share: Any) -> Any:
            return (microbatch, share)

    for name in ("SeesSteps", "FinishesTraining", "HasHparams", "OwnsMetrics", "SplitsPositions"):
        monkeypatch.setattr(module, name, Full)
    share: Any = SimpleNamespace(ranks=4)
    full: Any = CheckedTask(chosen(), Full())  # type: ignore[arg-type]
    full.begin_step(3)
    full.finalize()
    assert did == [("step", 3), "end"]
    assert (full.hparams(), full.own_metrics()) == ({"x": 1}, {"m": "metric"})
    assert full.split(share)("microbatch") == ("microbatch", share)
    plain = checked()
    plain.begin_step(3)
    plain.finalize()
    assert len(did) == 2
    assert (plain.hparams(), plain.own_metrics()) == ({}, {})
    with pytest.raises(JobError, match="^mesh.cp is 4, but task 't' needs all positions of a sample on one rank"):
        plain.split(share)
