"""Each check of the suites of optimizers and schedules fails for the faults that it is about, and for no other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CLOSED, REFUSED = "a_closed_gate_changes_no_bit", "a_refused_step_leaves_no_trace"
START, RESUMED = "state_is_complete_and_named_from_the_start", "a_resumed_optimizer_continues_bit_for_bit"
RATE, AWAY = (
    "the_learning_rate_factor_multiplies_the_base_rate",
    "parameters_of_other_ranks_have_meta_state_and_change_nothing",
)
AVERAGE = "evaluation_weights_are_there_inside_of_their_block_alone"
DIVIDED = "gradients_divided_in_the_step_count_as_if_divided_before"
OPTIMIZERS: Mapping[str, set[str]] = {
    "Faulty": set(),
    "IgnoresTheGate": {CLOSED, REFUSED},
    "MultipliesByTheGate": {CLOSED},
    "UpdatesStateBehindAClosedGate": {CLOSED, REFUSED},
    "CountsRefusedSteps": {REFUSED, RESUMED, RATE},
    "RemembersOutsideOfTheState": {RESUMED},
    "ReadsTheGate": {"a_step_never_waits_for_the_device"},
    "ListsTheGate": {"a_step_never_waits_for_the_device"},
    "NamesStateByPosition": {START},
    "MakesStateLate": {CLOSED, RESUMED, START},
    "GivesOutCopies": {RESUMED},
    "IgnoresTheFactor": {RATE},
    "FactorsAddUp": {RATE},
    "ForgetsTheFactorOfVectors": {RATE},
    "UpdatesTheLastParameterTwice": {"a_parameter_without_a_gradient_is_left_alone"},
    "AllocatesStateOfOtherRanks": {AWAY},
    "DescribesWithTensors": {"describe_is_plain_data_about_every_parameter"},
    "DividesLaterStepsToo": {DIVIDED},
    "KeepsEvaluationWeights": {AVERAGE},
    "EvaluatesTrainingWeights": {AVERAGE},
    "NarrowsState": {CLOSED, REFUSED, RESUMED, START},
    "ReportsTheBaseRate": {RATE},
    "SharesStateByShape": {START},
}
STEP, PAST, ONE = (
    "a_factor_depends_on_the_step_alone",
    "steps_past_the_end_have_factors_too",
    "a_run_of_one_step_has_a_factor_or_is_refused",
)
FINITE, PROCESS = "every_step_has_a_finite_factor_that_is_not_negative", "a_factor_is_the_same_in_every_process"
SCHEDULES: Mapping[str, set[str]] = {
    "counts its calls": {STEP},
    "remembers the lowest factor": {STEP, PAST},
    "negative near the end": {FINITE, PAST},
    "infinite in the first step": {ONE, FINITE},
    "NaN in the last step": {STEP, ONE, FINITE},
    "no factor past the end": {PAST},
    "NaN past the end": {PAST},
    "draws random numbers": {STEP, PROCESS},
    "draws one random number": {STEP, PROCESS},
    "returns tensors": {FINITE, PAST},
    "complex past the end": {PAST},
    "divides by zero in a run of one step": {ONE},
    "zero in every step": {FINITE},
}


def faults_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(f"{kind}_faults", Path(__file__).parent / "faults" / f"{kind}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def failed(suite: type[Any]) -> set[str]:
    """Checks that fail, of those that start no process."""
    found = set()
    for name in dir(suite):
        if name.startswith("test_") and name != "test_sharded_parameters_are_updated_as_whole_ones":
            try:
                getattr(suite(), name)()
            except pytest.skip.Exception:
                pass
            except AssertionError:
                found.add(name.removeprefix("test_"))
    return found


def test_checks_of_optimizers_fail_for_their_faults_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = faults_of("optimizers", monkeypatch)

    def suite(kind: Any) -> type[Any]:
        build = lambda _self, parameters: kind(module.FaultyConfig(), parameters)  # noqa: E731
        return type("Suite", (module.Sound,), {"build": build})

    assert {name: failed(suite(getattr(module, name))) for name in OPTIMIZERS} == OPTIMIZERS


def test_checks_of_schedules_fail_for_their_faults_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = faults_of("lr_schedules", monkeypatch)
    found = {name: failed(type("Suite", (module.Sound,), fields)) for name, (fields, _) in module.FAULTS.items()}
    assert found == SCHEDULES
    assert failed(module.Sound) == set()
