"""Components with members of optional protocols: all of them, and as the protocol says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from d9d_core.components.contract import deviations, optional_deviations
from d9d_core.optimizer import Optimizer
from d9d_core.subscriber import Subscriber
from d9d_core.task import Task


class Plain:
    """Optimizer without optional members."""

    lr = 0.1

    def init_state(self) -> None: ...

    def step(self, gate: Any) -> None: ...

    def set_lr_factor(self, factor: float) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {}


class Averages(Plain):
    """Optimizer that averages."""

    @property
    def average(self) -> tuple[str, float]:
        return "slot", 0.5

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        yield


class AveragesByMethod(Averages):
    """Optimizer whose property is a method."""

    def average(self) -> tuple[str, float]:  # type: ignore[override]
        return "slot", 0.5


class HalfAverages(Plain):
    """Optimizer with one of two members."""

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        yield


class DividesByTwo(Plain):
    """Optimizer whose method takes another number of arguments."""

    def divide_gradients(self) -> None: ...


class Forgets:
    """Subscriber that saves a state and cannot load it."""

    def subscriptions(self) -> list[Any]:
        return []

    def state(self) -> dict[str, Any]:
        return {}


class Steps:
    """Task whose optional method is a number."""

    begin_step = 5


@pytest.mark.parametrize("component", [Plain(), Averages()])
def test_a_component_with_all_or_no_members_of_an_optional_protocol_is_accepted(component: object) -> None:
    assert optional_deviations(component, Optimizer) == []


@pytest.mark.parametrize(
    ("component", "protocol", "problem"),
    [
        (
            AveragesByMethod(), Optimizer,
            "AveragesByMethod.average is a method; d9d_core.optimizer:AveragesWeights has a property: write @property "
            "above it",
        ),
        (
            HalfAverages(), Optimizer,
            "HalfAverages has evaluation_weights of d9d_core.optimizer:AveragesWeights, but lacks average; add the "
            "missing members, or rename the present ones",
        ),
        (
            DividesByTwo(), Optimizer,
            "DividesByTwo.divide_gradients takes () -> 'None'; it is called with (divisor), as "
            "d9d_core.optimizer:DividesGradients says",
        ),
        (
            Forgets(), Subscriber,
            "Forgets has state of d9d_core.subscriber:StatefulSubscriber, but lacks load_state; add the missing "
            "members, or rename the present ones",
        ),
        (Steps(), Task, "Steps.begin_step is not a method; make it one, as d9d_core.task:SeesSteps says"),
    ],
)  # fmt: skip
def test_a_wrong_or_missing_member_of_an_optional_protocol_is_named(
    component: object, protocol: type, problem: str
) -> None:
    assert optional_deviations(component, protocol) == [problem]


def test_an_attribute_of_one_object_is_no_member() -> None:
    subscriber = Forgets()
    plain = Plain()
    vars(plain)["average"] = 3.0
    assert optional_deviations(plain, Optimizer) == []
    assert optional_deviations(subscriber, Optimizer) == []


class Short(Task):
    """Task with the members that each task has to write itself."""

    def count(self, microbatch: Any) -> int:
        return 1

    def weights(self, microbatch: Any) -> dict[str, Any]:
        return {}

    def inputs(self, microbatch: Any) -> Any: ...

    def losses(self, outputs: Any, microbatch: Any) -> dict[str, Any]:
        return {}


def test_a_class_that_inherits_the_task_has_one_term_checks_nothing_and_observes_nothing() -> None:
    task = Short(None)
    task.check(None, {})
    assert (task.coefficients, task.observations({}, {})) == ({"loss": 1.0}, {})
    assert deviations(task, Task) == []
    assert optional_deviations(task, Task) == []


def test_a_task_may_assign_its_coefficients_and_is_weighted_by_its_count() -> None:
    class Two(Short):
        weights = Task.weights

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.coefficients = {"a": 1.0, "b": 0.5}

        def count(self, microbatch: Any) -> int:
            return len(microbatch["x"])

    assert Two(None).coefficients == {"a": 1.0, "b": 0.5}
    weights = Two(None).weights({"x": torch.zeros(3, 2)})
    assert {name: (weight.item(), weight.shape) for name, weight in weights.items()} == {"a": (3.0, ()), "b": (3.0, ())}
