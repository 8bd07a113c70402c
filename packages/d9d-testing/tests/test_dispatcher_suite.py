"""The dispatcher suite accepts a sound dispatcher and names the fault of a faulty one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("d9d_moe", reason="the suite is for plugins that build on d9d-moe")
from d9d_testing.suites.moe.dispatcher import DispatcherSuite
from d9d_testing.suites.moe.dispatcher_steps import Case

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


def test_repeated_steps_run_on_the_largest_world_and_random_routing_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, asked = suite("Sound", 1), list[tuple[int, int]]()
    monkeypatch.setattr(type(made), "ranks", (2, 1, 4, 3))

    def run(_suite: object, ranks: int, cases: Sequence[Case]) -> dict[str, Any]:
        asked.append((ranks, len(cases)))
        return {}

    monkeypatch.setattr(DispatcherSuite, "run", run)
    made.test_the_same_input_gives_the_same_bits()
    assert asked == [(4, 3)]
    made.test_any_routing_gives_the_sum_of_its_experts()
    assert all(ranks > 1 for ranks, _ in asked)
    assert all(8 <= cases <= 16 for _, cases in asked[1:])
    monkeypatch.setattr(type(made), "ranks", (1,))
    made.test_any_routing_gives_the_sum_of_its_experts()
    assert asked[-1][0] == 1
