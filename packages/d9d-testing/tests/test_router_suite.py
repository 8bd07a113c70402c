"""The router suite accepts a sound router and names the fault of a faulty one."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_testing.suites.moe import router as router_suite
from d9d_testing.suites.moe.router import RouterSuite

ROUTERS = Path(__file__).parent / "faults" / "implementations" / "broken_routers.py"


def suite(fault: str = "", **settings: Any) -> RouterSuite:
    values = {"factory": f"{ROUTERS}:Router", "settings": {"tried": {"fault": fault, **settings}}}
    made: RouterSuite = type("Suite", (RouterSuite,), values)()
    return made


TESTS = [name for name, _ in inspect.getmembers(RouterSuite, inspect.isfunction) if name.startswith("test_")]
ONLY_WITH = {"test_a_token_uses_few_groups": "groups", "test_no_expert_takes_more_than_its_capacity": "capacity"}


@pytest.mark.parametrize("test", [name for name in TESTS if name not in ONLY_WITH])
def test_a_sound_router_passes(test: str) -> None:
    getattr(suite(), test)()


def test_a_sound_dropping_router_passes() -> None:
    suite(capacity=1).test_no_expert_takes_more_than_its_capacity()


@pytest.mark.parametrize("test", ONLY_WITH)
def test_what_a_router_does_not_do_is_skipped(test: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"no settings with .*{ONLY_WITH[test]}"):
        getattr(suite(), test)()


FAULTS = [
    ("narrow indices", {}, "test_it_gives_what_dispatchers_need", "indices are torch.int32, expected torch.int64"),
    ("counts wrong", {}, "test_counts_are_those_of_the_indices", "tried"),
    ("one expert twice", {}, "test_a_token_goes_to_different_experts", "tried"),
    ("equal weights", {}, "test_weights_are_shares_of_the_scores", "weight / score"),
    ("weighs what it drops", {"capacity": 1}, "test_weights_are_shares_of_the_scores", "dropped rows have weights"),
    ("narrow scores", {}, "test_scores_are_float32_whatever_the_model_is", "bfloat16: scores"),
    ("higher expert wins", {}, "test_of_equal_scores_the_lower_expert_wins", "7, 6, 5"),
    ("overflows", {}, "test_extreme_tokens_give_finite_weights", "scores of tokens times 10000.0"),
    ("teaches nothing", {}, "test_gradients_reach_tokens_and_every_parameter", "a gradient of zeros for tokens"),
    ("", {"groups": 4, "top_groups": 1}, "test_a_token_uses_few_groups", "a token uses"),
    ("exceeds its capacity", {"capacity": 1}, "test_no_expert_takes_more_than_its_capacity", "of 1"),
    ("counts drops wrong", {"capacity": 1}, "test_no_expert_takes_more_than_its_capacity", "tally 'dropped'"),
    ("state is not saved", {}, "test_the_same_tokens_choose_alike", "tried: "),
]


@pytest.mark.parametrize(
    ("fault", "settings", "test", "text"), FAULTS, ids=[fault or test for fault, _, test, _ in FAULTS]
)
def test_a_fault_is_found_and_named(fault: str, settings: dict[str, Any], test: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        getattr(suite(fault, **settings), test)()


@pytest.mark.parametrize(("settings", "highest"), [({}, -1), ({"capacity": 1}, 0)])
def test_only_routers_that_drop_have_the_index_of_no_expert(settings: dict[str, Any], highest: int) -> None:
    experts = router_suite._EXPERTS

    def check(last: int) -> None:
        indices = torch.tensor([[0, last], [last, 1]])
        counts = indices.flatten().bincount(minlength=experts + 2)[:experts]
        made: Any = suite(**settings)
        made.routers = lambda: [("tried", lambda _tokens: SimpleNamespace(indices=indices, counts=counts))]
        made.test_counts_are_those_of_the_indices()

    check(experts + highest)
    with pytest.raises(AssertionError, match="tried: an index names no expert"):
        check(experts + highest + 1)
