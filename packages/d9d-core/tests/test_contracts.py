"""Components that do not keep the protocol of their kind, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core import events as ev
from d9d_core.components.contract import (
    check_component,
    check_mapping,
    check_metric,
    check_optimizer,
    check_returned,
    check_trainable,
    deviations,
)
from d9d_core.errors import BuildError
from d9d_core.metric import Metric
from d9d_core.subscriber import Subscriber


@dataclass
class Record:
    """Stand-in of a selected record."""

    kind: Any

    def __str__(self) -> str:
        return "'x' (acme)"


def chosen(kind: str, where: str = "place") -> Any:
    return SimpleNamespace(where=where, entry=Record(SimpleNamespace(name=kind)))


def refusal(kind: str, component: object) -> str:
    with pytest.raises(BuildError) as caught:
        check_component(chosen(kind), component)
    begin = f"place: {kind} 'x' (acme): "
    assert str(caught.value).startswith(begin)
    return str(caught.value).removeprefix(begin)


class Subscribes:
    """Subscriber with the given pairs."""

    def __init__(self, pairs: object) -> None:
        self._pairs = pairs

    def subscriptions(self) -> Any:
        return self._pairs


def test_a_component_that_is_nothing_or_no_module_is_named() -> None:
    assert refusal("dataset", None) == "build returned nothing; return the component"
    assert refusal("model", 3) == "build returned an int, which is not a torch.nn.Module"
    check_component(chosen("model"), torch.nn.Linear(1, 1))
    check_component(chosen("unknown kind"), 3)


def test_subscriptions_are_pairs_of_an_event_of_d9d_and_a_function() -> None:
    check_component(chosen("subscriber"), Subscribes([(ev.StepEnds, print), (ev.ModelReady, print)]))
    text = "return pairs of an event type and a function"
    for pair in ([ev.StepEnds, print], (ev.StepEnds,), (ev.StepEnds, print, print), (ev.StepEnds, "print")):
        found = refusal("subscriber", Subscribes([(ev.StepEnds, print), pair]))
        assert found == f"subscriptions() contains {pair!r}; {text}"
    assert refusal("subscriber", Subscribes(3)) == "subscriptions() returned an int, not Iterable"
    assert refusal("subscriber", Subscribes([(str, print)])).startswith(
        "subscribes to <class 'str'>; events are: EventsReady, JobConfigured, ModelPlanned, "
    )


@pytest.mark.parametrize(
    ("value", "kinds", "said"),
    [
        (True, (int,), "returned a bool, not int"),
        (None, (int, str), "returned nothing, not int or str"),
        ("3", (int,), "returned a str, not int"),
    ],
)
def test_a_returned_value_of_another_type_is_an_error(value: object, kinds: tuple[type, ...], said: str) -> None:
    check_returned(chosen("task"), "f()", 3, int)
    with pytest.raises(BuildError) as caught:
        check_returned(chosen("task"), "f()", value, *kinds)
    assert str(caught.value) == f"place: task 'x' (acme): f() {said}"


def test_each_value_of_a_mapping_is_checked() -> None:
    check_mapping(chosen("task"), "f()", {"a": 1}, int)
    with pytest.raises(BuildError, match=r"f\(\), for 'b', returned a str, not int$"):
        check_mapping(chosen("task"), "f()", {"a": 1, "b": "2"}, int)
    with pytest.raises(BuildError, match=r"f\(\) returned a list, not Mapping$"):
        check_mapping(chosen("task"), "f()", [1], int)


def metric(reductions: Any, **state: Any) -> Metric:
    return cast("Metric", SimpleNamespace(reductions=reductions, state=lambda: state))


def test_a_metrics_state_has_the_names_and_merges_of_its_reductions() -> None:
    check_metric(chosen("metric"), metric({"a": "sum", "b": "max"}, a=torch.ones(1), b=torch.ones(1)))
    with pytest.raises(BuildError) as caught:
        check_metric(chosen("metric"), metric({"a": "sum", "b": "mean"}, a=torch.ones(1), b=torch.ones(1)))
    assert str(caught.value) == (
        "place: metric 'x' (acme): 'reductions' gives 'b' the unknown 'mean'; choose from: sum, max, min; express a "
        "mean by a sum and a count"
    )
    with pytest.raises(BuildError, match=r"must have the same names; only one has: b, c$"):
        check_metric(chosen("metric"), metric({"a": "sum", "b": "sum"}, a=torch.ones(1), c=torch.ones(1)))
    with pytest.raises(BuildError, match=r"state\(\), for 'a', returned an int, not Tensor$"):
        check_metric(chosen("metric"), metric({"a": "sum"}, a=3))
    with pytest.raises(BuildError, match=r"reductions, for 'a', returned an int, not str$"):
        check_metric(chosen("metric"), metric({"a": 3}, a=torch.ones(1)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": lambda: {"m": 3}}, r"state\(\), for 'm', returned an int, not Tensor$"),
        ({"describe": list}, r"describe\(\) returned a list, not Mapping$"),
        ({"lr": "0.1"}, "lr returned a str, not Real$"),
    ],
)
def test_an_optimizers_state_description_and_rate_are_checked(changes: Any, said: str) -> None:
    good: Any = {"state": lambda: {"m": torch.ones(1)}, "describe": dict, "lr": 0.1}
    check_optimizer(chosen("optimizer"), cast("Any", SimpleNamespace(**good)))
    with pytest.raises(BuildError, match=said):
        check_optimizer(chosen("optimizer"), cast("Any", SimpleNamespace(**{**good, **changes})))


def test_trainable_parameters_are_a_set() -> None:
    check_trainable(chosen("peft method"), {"a"})
    with pytest.raises(BuildError, match=r"inject\(\) returned a list, not Set$"):
        check_trainable(chosen("peft method"), ["a"])


def test_a_schedule_of_rates_returns_numbers() -> None:
    assert refusal("lr schedule", lambda _step: "1") == "the call with step 0 returned a str, not Real"
    check_component(chosen("lr schedule"), lambda step: 1.0 if step == 0 else "only step 0 is tried")


class Property:
    @property
    def subscriptions(self) -> list[Any]:
        return []


class Value:
    subscriptions = 3


class Takes:
    def subscriptions(self, more: int) -> list[Any]:
        return [more]


@pytest.mark.parametrize(
    ("component", "said"),
    [
        (object(), "object lacks subscriptions() of d9d_core.subscriber:Subscriber"),
        (Property(), "Property.subscriptions is a property; make it a method, as d9d_core.subscriber:Subscriber says"),
        (Value(), "Value.subscriptions is not a method; make it one, as d9d_core.subscriber:Subscriber says"),
        (
            Takes(),
            "Takes.subscriptions takes (more: 'int') -> 'list[Any]'; it is called with (), as "
            "d9d_core.subscriber:Subscriber says",
        ),
    ],
)
def test_a_member_of_another_form_is_named_with_its_protocol(component: object, said: str) -> None:
    assert deviations(component, Subscriber) == [said]
