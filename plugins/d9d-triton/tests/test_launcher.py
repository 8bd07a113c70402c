"""Direct launches: equal keys mean equal specialisations of Triton, and launches get the arguments that Triton gives.

Triton compiles for an H100 without a GPU; stand-ins of its driver and of a CUDA device note launches. Interpreted
kernels have no launches, so this runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
launcher = pytest.importorskip("d9d_triton.launcher")

_INTEGERS = st.one_of(
    st.integers(-40, 40),
    *(st.integers(center - 20, center + 20) for center in (-(2**31), 2**31, 2**32, 2**63 - 21)),
    st.integers(-(2**62), 2**62),
)
_NUMBERS = st.one_of(_INTEGERS, st.floats(), st.booleans())


@settings(max_examples=500, deadline=None)
@given(_NUMBERS, _NUMBERS)
@pytest.mark.smoke
def test_numbers_of_one_class_are_one_specialisation_of_triton(one: float, other: float) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    def of_triton(number: float) -> Any:
        return native_specialize_impl(BaseBackend, number, False, True, True)

    same = launcher.specialisation(one) == launcher.specialisation(other) and type(one) is type(other)
    if same:
        assert of_triton(one) == of_triton(other)
    elif type(one) is type(other):  # no finer than Triton's, so that nothing is compiled or looked up twice
        assert of_triton(one) != of_triton(other)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "launches_on_a_stand_in.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_direct_launches_run_the_kernel_that_triton_would_run(found: dict[str, Any]) -> None:
    """Over dtypes, unaligned views, sizes of 1, sizes not divisible by 16 and beyond 32 bits, constants and options."""
    assert found["compared"] > 100
    assert found["wrong"] == []
    assert found["kernels"] > 10


@pytest.mark.full
def test_only_the_first_launch_of_a_specialisation_is_tritons(found: dict[str, Any]) -> None:
    assert found["by_triton"] == found["kernels"]
    assert found["direct"] == found["compared"] - found["by_triton"] > 100


@pytest.mark.full
@pytest.mark.parametrize(
    "reason",
    [
        "an enter hook",
        "an exit hook",
        "a hook that is a function",
        "a hook before runs",
        "debug mode",
        "instrumentation",
        "a CPU",
    ],
)  # fmt: skip
def test_observed_launches_are_tritons(found: dict[str, Any], reason: str) -> None:
    assert found["observed"][reason] == {"triton": 1, "direct": 0}


@pytest.mark.full
@pytest.mark.parametrize("form", ["a number before a tensor", "no number", "a constant by position", "two devices"])
def test_arguments_of_another_form_are_launched_by_triton(found: dict[str, Any], form: str) -> None:
    assert found["forms"][form] == {"triton": 1, "direct": 0}


@pytest.mark.full
def test_launches_are_forgotten_when_there_are_too_many(found: dict[str, Any]) -> None:
    assert found["remembered"] <= found["most"]
    assert found["after_forgetting"] == []


@pytest.mark.full
def test_a_remembered_kernel_stays_loaded_without_tritons_cache(found: dict[str, Any]) -> None:
    assert found["loaded"]


@pytest.mark.full
def test_a_kernel_runs_on_the_device_of_its_tensors(found: dict[str, Any]) -> None:
    assert found["entered"] == [1]
