"""The strategy suite accepts a good strategy and names the fault of a faulty one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.suites.strategy import StrategySuite
from d9d_verify.layouts import Layout

PLUGIN = str(Path(__file__).parent / "faults" / "implementations" / "broken_strategies.py")


def suite(fault: str, meshes: Sequence[Mapping[str, int]] = ({"dp_replicate": 2},)) -> StrategySuite:
    values = {"plugin": PLUGIN, "target": "by_hand", "meshes": meshes, "settings": ({"fault": fault},)}
    made: StrategySuite = type("Suite", (StrategySuite,), values)()
    return made


def check(of: StrategySuite, name: str) -> None:
    method = getattr(of, name)
    method(**dict.fromkeys(inspect.signature(method).parameters, 2))


CHECKS = [name for name in dir(StrategySuite) if name.startswith("test_")]


@pytest.mark.parametrize("name", CHECKS)
def test_a_good_strategy_passes(name: str) -> None:
    check(suite("none"), name)


NUMBERS = "test_loss_gradients_and_updates_are_those_of_one_process"
COMMUNICATES = "test_the_collectives_of_a_traced_step_are_those_it_declares"
SAYS = "test_it_says_what_it_changed_and_whose_gradients_it_reduces"
FAULTS = [
    ("sums_nothing", NUMBERS, "replicas diverge, and a checkpoint would keep only one of them"),
    ("claims_and_does_not", NUMBERS, "the gradient of layers.1.weight most"),
    ("changes_numbers", NUMBERS, "step 1: the loss is off by"),
    ("changes_random_numbers", NUMBERS, "step 1: the loss is off by"),
    ("renames", "test_names_and_shapes_of_parameters_stay", "gone ['layers.0.weight'], new ['layers.0.inner.weight']"),
    ("changes_shapes", "test_names_and_shapes_of_parameters_stay", "(before, after): {'layers.0.weight': ((6, 6), (3"),
    ("allocates", "test_nothing_is_allocated", "allocates ['layers.0.weight']; the build does that"),
    ("changes_nothing", SAYS, "Applied.modules is empty"),
    ("invents_a_module", SAYS, "Applied.modules names that do not exist: ['layers.9']"),
    ("invents_a_parameter", SAYS, "Applied.gradients names parameters that do not exist: ['layers.0.bias']"),
    ("invents_an_axis", SAYS, "Applied.gradients names axes that do not exist: ['dp']"),
    ("needs_few_ranks", "test_the_plan_of_a_large_job_needs_no_processes", "no more than 8 ranks"),
    ("adds_state", "test_a_run_continues_in_one_process_and_back", "'model/calls' is in the checkpoint only"),
    ("declares_no_collectives", COMMUNICATES, "Applied.collectives is None"),
    (
        "hides_a_collective",
        COMMUNICATES,
        "in addition to exactly listed calls, listed 0 times, made 2 times: [16, 16]",
    ),
    ("invents_a_collective", COMMUNICATES, "all_reduce of 16 bytes among (0, 1): listed 2 times, made 0 times"),
    ("miscounts_a_collective", COMMUNICATES, "listed 0 times, made 2 times: [16, 16] bytes"),
]


@pytest.mark.full
@pytest.mark.parametrize(("fault", "name", "text"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_found_and_named(fault: str, name: str, text: str) -> None:
    with pytest.raises(Exception, match=re.escape(text)):
        check(suite(fault), name)


def test_meshes_without_ranks_along_the_strategys_axes_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"add a mesh with two or more ranks along \['dp_replicate'\]"):
        check(suite("sums_nothing", meshes=({},)), "test_every_axis_of_its_record_is_tested")


@pytest.mark.full
@pytest.mark.parametrize(("lr", "passes"), [(0.05, True), (0.06, False)])
def test_a_resumed_run_that_goes_on_differently_is_noticed(lr: float, passes: bool) -> None:
    values: dict[str, Any] = suite("none").job_values(batch={"size": 4})
    plain, other = Layout("here", {}, ()), Layout("there", {}, (), (f"optimizer.lr={lr}",))
    verdict = Harness(values, ["d9d_testing.toy.plugin"], steps=4).compare_resumed(plain, other)
    if passes:
        assert_passed([verdict])
    else:
        with pytest.raises(AssertionError, match=r"here, then there: step 3: the learning rate is off by 2.0e-01"):
            assert_passed([verdict])
