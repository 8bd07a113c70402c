"""The dispatcher suite accepts a sound dispatcher and names the fault of a faulty one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("d9d_moe", reason="the suite is for plugins that build on d9d-moe")
from d9d_testing.suites.moe.dispatcher import DispatcherSuite

pytestmark = pytest.mark.thorough

DISPATCHERS = Path(__file__).parent / "faults" / "implementations" / "broken_dispatchers.py"
COMPUTES = "test_tokens_meet_their_experts_wherever_those_are"


def suite(name: str, ranks: int) -> DispatcherSuite:
    values = {"factory": f"{DISPATCHERS}:{name}", "ranks": (ranks,), "dtypes": ("float32",), "hidden": 8}
    made: DispatcherSuite = type("Suite", (DispatcherSuite,), values)()
    return made


@pytest.mark.parametrize("test", [name for name in dir(DispatcherSuite) if name.startswith("test_")])
def test_a_sound_dispatcher_passes(test: str) -> None:
    getattr(suite("Sound", 1), test)()


FAULTS = [
    ("DoublesTheGradientOfTokens", 2, COMPUTES, "float32, spread: tokens 0"),
    ("ForgetsTheGradientOfWeights", 1, COMPUTES, r"(?s)weights got no gradient on rank 0.*in float32, spread"),
    ("Averages", 1, COMPUTES, "float32, spread: out 0"),
    ("ChangesTokens", 1, COMPUTES, "the dispatcher has changed tokens in place"),
    ("HidesSpareRows", 2, COMPUTES, "rows are padding, but spare_rows is False"),
    ("CountsTooMany", 1, COMPUTES, "counts add up to"),
    ("Widens", 1, COMPUTES, "combine returned torch.float64, the outputs of the experts are torch.float32"),
    ("LeavesThingsToChance", 1, "test_the_same_input_gives_the_same_bits", "float32: out differs"),
]


@pytest.mark.parametrize(("name", "ranks", "test", "text"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_found_and_named(name: str, ranks: int, test: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        getattr(suite(name, ranks), test)()
