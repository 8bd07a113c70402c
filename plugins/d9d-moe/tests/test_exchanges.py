"""Collectives that expert parallelism declares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_core.strategy import StepShape
from d9d_moe.expert_parallel.communication import ExpertCommunication

SHAPE = cast("StepShape", SimpleNamespace(forwards=3, backwards=2, itemsize=2, bytes_of=lambda *given: given))


def layer(dispatcher: object, router: object = None) -> Any:
    return SimpleNamespace(dispatcher=dispatcher, router=router, expert_banks=dict)


def declared(ranks: tuple[int, ...], one: Any, dispatcher: Any, split: int = 1) -> list[Any]:
    return list(ExpertCommunication({"ffn": (one, dispatcher)}, {"ffn": 4}, ranks, split)(SHAPE))


def test_a_layer_exchanges_counts_tokens_labels_and_outputs_and_their_gradients() -> None:
    dispatcher = SimpleNamespace()
    found = declared((0, 1), layer(dispatcher), dispatcher)
    assert [(one.kind, one.group, one.ranks) for one in found] == [("all_to_all", "ep", (0, 1))] * 7
    assert found[0].bytes == 8 * (1 + 4 // 2) * 2  # one number more than experts of a rank, to each rank
    assert [one.bytes for one in found[1:]] == [None] * 6
    assert [one.count for one in found] == [3, 3, 3, 3, 2, 2, 2]


def test_a_token_is_sent_to_the_ranks_that_have_one_of_its_experts() -> None:
    dispatcher = SimpleNamespace()
    router = SimpleNamespace(top_k=2, capacity=1.5)
    found = declared((0, 1), layer(dispatcher, router), dispatcher, split=2)
    assert found[0].bytes == 8 * (3 + 4 // 2) * 2
    # Of the 6 pairs of 4 experts, one is on the other rank alone, so a token goes to 2 * 5 / 6 ranks; half of the
    # tokens are this rank's. Labels are two numbers, and weights one number, for each of the two experts.
    assert found[2].bytes == (pytest.approx(5 / 6 * 2 * 2), 4)
    assert found[6].bytes == (pytest.approx(5 / 6 * 2), 4)


@pytest.mark.parametrize(("ranks", "own"), [((0,), True), ((0, 1), False)])
def test_a_single_rank_and_a_layer_with_another_dispatcher_exchange_nothing(ranks: tuple[int, ...], own: bool) -> None:
    dispatcher = SimpleNamespace()
    assert declared(ranks, layer(dispatcher if own else SimpleNamespace()), dispatcher) == []
