"""Execution of several stages on one rank: tensors passed on, gradients, and losses. Parts are stand-ins."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.schedule import Backward, Forward, Reduce, SendActivation
from d9d_core.task import StageInputs
from d9d_engine.step.executor import Executor
from torch import Tensor, nn


class First(nn.Module):
    """First stage: y = w x, and the ids unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, *, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.weight * x + shift, "ids": torch.tensor([7])}


class Last(nn.Module):
    """Last stage: z = w y."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(5.0))

    def forward(self, *, hidden: Tensor, ids: Tensor, shift: Tensor) -> dict[str, Tensor]:
        assert ids.tolist() == [7]
        assert not ids.requires_grad
        return {"z": self.weight * hidden}


class Task:
    """Loss terms of the output: its sum, and twice its sum."""

    coefficients = {"one": 1.0, "two": 0.5}
    late = False
    both = False

    def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        shared = {"shift": microbatch["shift"]} | ({"x": microbatch["x"]} if self.both else {})
        return StageInputs(first={"x": microbatch["x"]}, shared=shared, kept={"mask": microbatch["shift"]})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert outputs["mask"] is microbatch["shift"]
        return {"one": outputs["z"].sum(), "two": 2 * outputs["z"].sum()}

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": outputs["z"].sum() + len(microbatch)}

    def observations(self, outputs: Mapping[str, Tensor], _microbatch: object) -> dict[str, float]:
        return {"z": outputs["z"].item()}


PROGRAM = (
    Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0), Forward(0, 1), Forward(1, 1), Backward(1, 1),
    Backward(0, 1), Reduce(0), Reduce(1),
)  # fmt: skip


class Statistics:
    def __init__(self, did: list[Any], tallied: bool) -> None:
        self._did, self.tallied = did, tallied

    def update(self, observations: Any) -> None:
        self._did.append(("observed", observations))

    def tally(self, counted: Any) -> None:
        self._did.append(("tallied", {name: tensor.item() for name, tensor in counted.items()}))


class Parts:
    """Collaborators of an executor; ``did`` has their calls in order."""

    def __init__(self, task: Task | None = None, tallied: bool = True, kinds: frozenset[Any] | None = None) -> None:
        self.did: list[Any] = []
        self.count = torch.zeros(())
        self.stages = {0: First(), 1: Last()}
        pipeline: Any = SimpleNamespace(
            hosts=(0, 0),
            kinds=kinds or frozenset({Forward, Backward, Reduce}),
            program=lambda _rank, _count: PROGRAM,
            forward_program=lambda _rank, _count: tuple(one for one in PROGRAM if isinstance(one, Forward)),
        )
        boundaries: Any = SimpleNamespace(conform=lambda _stage, outputs, _microbatch: outputs)
        gradients: Any = SimpleNamespace(
            before_backward=lambda **given: self.did.append(("backward", given)),
            reduce=lambda stage: self.did.append(("reduce", stage)),
        )
        statistics: Any = Statistics(self.did, tallied)
        auxiliary: Any = SimpleNamespace(begin=lambda scale: self.did.append("begin"), take=self._auxiliary)
        tallies: Any = SimpleNamespace(take=self._tallies)
        topology: Any = SimpleNamespace(coordinate={"pp": 0}, device=torch.device("cpu"))
        self.draws: list[tuple[int, int, int]] = []
        of_task: Any = task or Task()
        self.executor = Executor(
            self.stages, pipeline, boundaries, topology, of_task, auxiliary, tallies, gradients, statistics, self._draw
        )

    def _draw(self, step: int, microbatch: int, stage: int) -> int:
        self.draws.append((step, microbatch, stage))
        return 0

    def _auxiliary(self, stage: int) -> dict[str, Tensor]:
        return {"balance": torch.tensor(11.0)} if stage == 0 else {}

    def _tallies(self, stage: int) -> dict[str, Tensor]:
        if stage:
            return {}
        self.count += 1
        return {"tokens": self.count}

    def grad(self, stage: int) -> float:
        grad = self.stages[stage].weight.grad
        assert isinstance(grad, Tensor)
        return float(grad)


PACK: Any = [{"x": torch.tensor(2.0), "shift": torch.tensor(1.0)}, {"x": torch.tensor(4.0), "shift": torch.tensor(0.0)}]
SCALE = {"one": torch.tensor(0.25), "two": torch.tensor(0.5), "balance": torch.tensor(2.0)}


def test_a_step_passes_outputs_on_and_gradients_back_and_sums_terms() -> None:
    parts = Parts()
    found = parts.executor.run(3, PACK, SCALE)
    # Outputs: 5 (3 * 2 + 1) = 35 and 5 * 3 * 4 = 60. The loss is z (0.25 + 0.5 * 2 * 0.5) = 0.75 z.
    assert {term: mean.item() for term, mean in found.terms.items()} == {
        "balance": 44.0, "one": 0.25 * 95, "two": 0.5 * 2 * 95,
    }  # fmt: skip
    assert found.terms["one"].requires_grad is False
    assert parts.grad(1) == pytest.approx(0.75 * (7 + 12))
    assert parts.grad(0) == pytest.approx(0.75 * 5 * (2 + 4))
    assert parts.draws == [(3, 0, 0), (3, 0, 1), (3, 1, 0), (3, 1, 1)]
    backward = {"complete": True, "last": False}
    assert parts.did == [
        "begin",
        ("observed", {"z": 35.0}),
        ("backward", {**backward, "stage": 1}),
        ("backward", {**backward, "stage": 0}),
        ("observed", {"z": 60.0}),
        ("backward", {"complete": True, "last": True, "stage": 1}),
        ("backward", {"complete": True, "last": True, "stage": 0}),
        ("reduce", 0),
        ("reduce", 1),
        ("tallied", {"tokens": 1.0}),
        ("tallied", {"tokens": 2.0}),
    ]


def test_a_task_that_weighs_outputs_has_the_sum_of_their_weights() -> None:
    class Late(Task):
        late = True

    parts = Parts(Late(), tallied=False)
    for _ in range(2):
        weight = parts.executor.run(0, PACK, SCALE).weight
        assert weight is not None
        assert weight.item() == 35 + 60 + 4
    assert not [one for one in parts.did if one[0] == "tallied"]


def test_an_evaluation_has_outputs_without_gradients_losses_or_draws() -> None:
    parts = Parts()
    outputs: list[Any] = []
    parts.executor.evaluate(PACK, lambda found, microbatch: outputs.append((found["z"].item(), microbatch)))
    assert outputs == [(35.0, PACK[0]), (60.0, PACK[1])]
    assert (parts.draws, parts.did) == ([], [])
    parts.executor.evaluate(PACK, lambda *_: None, step=0)
    assert parts.draws == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_names_of_inputs_and_outputs_are_told_apart() -> None:
    class Both(Task):
        both = True

    with pytest.raises(
        BuildError, match="^stage 0 gets the input x twice, from the task's first inputs and from the task's shared"
    ):
        Parts(Both()).executor.run(0, PACK, SCALE)

    class Kept(Task):
        def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
            first = {"x": microbatch["x"]}
            return StageInputs(first=first, shared={"shift": microbatch["shift"]}, kept={"z": microbatch["x"]})

    with pytest.raises(
        BuildError, match="^the task's kept inputs and the model's outputs both have the name z; rename one"
    ):
        Parts(Kept()).executor.run(0, PACK, SCALE)

    class Hidden(Task):
        def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
            shared = {"shift": microbatch["shift"], "hidden": microbatch["x"]}
            return StageInputs(first={"x": microbatch["x"]}, shared=shared)

    parts = Parts(Hidden())
    parts.stages[0].forward = lambda **given: {"hidden": given["x"]}  # type: ignore[method-assign]
    with pytest.raises(
        BuildError, match="^stage 1 gets the input hidden twice, from the previous stage and from the task's shared inp"
    ):
        parts.executor.run(0, PACK, SCALE)


def test_a_schedule_with_actions_that_have_no_handler_is_refused() -> None:
    with pytest.raises(
        BuildError, match="^pipeline: the schedule has actions without a handler: SendActivation; add them"
    ):
        Parts(kinds=frozenset({Forward, SendActivation}))
