"""Plan and labels of a dispatch against a loop over ranks and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from d9d_moe.all_to_all.plan import Plan, make_plan, read_labels, tokens_of, write_labels
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Choices:
    """Experts of T tokens, k of each, on W ranks with ``local`` experts each; W * local means no expert."""

    ranks: int
    local: int
    top_k: int
    chosen: list[list[int]]
    limit: int | None = None

    @property
    def experts(self) -> int:
        return self.ranks * self.local

    @property
    def indices(self) -> Tensor:
        return torch.tensor(self.chosen, dtype=torch.int64).view(-1, self.top_k)

    def plan(self) -> Plan:
        return make_plan(self.indices, self.ranks, self.local, self.limit)

    def tokens_for(self, rank: int) -> list[int]:
        return [t for t, row in enumerate(self.chosen) if any(expert // self.local == rank for expert in row)]


@st.composite
def choices(draw: st.DrawFn) -> Choices:
    """Some experts several times in a token, or no expert; with a limit, no expert more often than that."""
    ranks, local, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    nobody = ranks * local
    row = st.lists(st.integers(0, nobody), min_size=top_k, max_size=top_k)
    chosen, limit = draw(st.lists(row, max_size=8)), draw(st.none() | st.integers(1, 4))
    taken = [0] * (nobody + 1)
    for experts in chosen if limit is not None else ():
        for place, expert in enumerate(experts):
            taken[expert] += 1
            if taken[expert] > limit:
                experts[place] = nobody
    return Choices(ranks, local, top_k, chosen, limit)


def weights_like(indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(indices.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def rows_by_rank(plan: Plan) -> list[slice]:
    """Rows that each rank is sent, padding included."""
    counts = plan.tokens.tolist() if plan.padded is None else [plan.padded] * len(plan.tokens)
    return [slice(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(len(counts))]


NO_TOKEN = Choices(ranks=3, local=2, top_k=2, chosen=[])
FEWER_RANKS_THAN_CHOICES = Choices(ranks=2, local=2, top_k=4, chosen=[[0, 3, 0, 1], [2, 2, 4, 3], [4, 4, 4, 4]])
MORE_RANKS_THAN_CHOICES = Choices(ranks=4, local=1, top_k=2, chosen=[[3, 0], [1, 1], [4, 2], [2, 3]])


@pytest.mark.smoke
@given(case=choices(), dtype=st.sampled_from([torch.float32, torch.float64]))
@example(case=NO_TOKEN, dtype=torch.float64)
@example(case=FEWER_RANKS_THAN_CHOICES, dtype=torch.float64)
@example(case=MORE_RANKS_THAN_CHOICES, dtype=torch.float32)
@settings(max_examples=150)
def test_each_rank_learns_its_experts_of_its_tokens_and_nobody_elses(case: Choices, dtype: torch.dtype) -> None:
    plan, weights = case.plan(), weights_like(case.indices, dtype)
    labels, tokens = write_labels(plan, case.indices, weights, case.experts), tokens_of(plan)
    for rank, rows in enumerate(rows_by_rank(plan)):
        expected = case.tokens_for(rank)
        padding = rows.stop - rows.start - len(expected)
        assert tokens[rows].tolist()[: len(expected)] == expected
        experts, factors = read_labels(labels[rows], rank, case.local)
        own = [[expert // case.local == rank for expert in case.chosen[token]] for token in expected]
        numbers = [
            [expert % case.local if mine else case.local for expert, mine in zip(case.chosen[token], row, strict=True)]
            for token, row in zip(expected, own, strict=True)
        ]
        assert experts.tolist() == numbers + padding * [case.top_k * [case.local]]
        assert factors.dtype == dtype
        assert factors[: len(expected)].tolist() == [
            [weight if mine else 0.0 for weight, mine in zip(weights[token].tolist(), row, strict=True)]
            for token, row in zip(expected, own, strict=True)
        ]
        assert not factors[len(expected) :].any()


@given(case=choices())
@example(case=NO_TOKEN)
@example(case=FEWER_RANKS_THAN_CHOICES)
@example(case=MORE_RANKS_THAN_CHOICES)
@settings(max_examples=150)
def test_rows_and_places_are_each_others_inverse(case: Choices) -> None:
    plan, rows = case.plan(), rows_by_rank(case.plan())
    travels = [case.tokens_for(rank) for rank in range(case.ranks)]
    assert plan.tokens.tolist() == [len(tokens) for tokens in travels]
    slots, places = plan.slots.tolist(), plan.places.tolist()
    leaving = rows[-1].stop
    taken = set()
    for token in range(len(case.chosen)):
        for rank in range(case.ranks):
            place = places[token][rank]
            if token in travels[rank]:
                assert rows[rank].start <= place < rows[rank].stop
                assert slots[place] == token * case.ranks + rank
                taken.add(place)
            else:
                assert place >= leaving
    assert all(slot == -1 for place, slot in enumerate(slots) if place not in taken)
    room = case.ranks * plan.padded if plan.padded is not None else len(case.chosen) * min(case.ranks, case.top_k)
    assert len(slots) == room >= leaving


@pytest.mark.parametrize(
    ("case", "leaving"),
    [
        (Choices(ranks=4, local=2, top_k=2, chosen=3 * [[0, 7]]), 6),  # each choice to another rank
        (Choices(ranks=2, local=2, top_k=3, chosen=3 * [[0, 1, 2]]), 6),  # all ranks
    ],
    ids=["more ranks than choices", "fewer ranks than choices"],
)
def test_there_is_room_for_as_many_rows_as_may_leave_and_no_more(case: Choices, leaving: int) -> None:
    plan = case.plan()
    assert plan.tokens.sum() == len(plan.slots) == leaving
    assert not (plan.slots < 0).any()


def test_with_a_limit_a_rank_gets_no_more_rows_than_tokens_or_its_experts_take() -> None:
    chosen = [[0, 1], [4, 4], [1, 2], [4, 4], [4, 4]]
    assert Choices(2, 2, 2, chosen, limit=2).plan().padded == 4
    assert Choices(2, 2, 2, chosen, limit=100).plan().padded == len(chosen)


@pytest.mark.parametrize(
    ("dtype", "arrives"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_weights_arrive_with_every_bit_and_those_of_others_as_zeros(dtype: torch.dtype, arrives: torch.dtype) -> None:
    values: list[Any] = [1 / 3, -0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny, torch.finfo(dtype).max]
    case = Choices(ranks=2, local=2, top_k=6, chosen=[[0, 1, 0, 1, 0, 1], [0, 1, 0, 2, 3, 2]])
    weights = torch.tensor([values, values], dtype=dtype)
    labels = write_labels(case.plan(), case.indices, weights, case.experts)
    _, found = read_labels(labels[:2], 0, case.local)
    assert found.dtype == arrives
    bits = torch.int64 if arrives == torch.float64 else torch.int32
    assert torch.equal(found[0].view(bits), weights[0].to(arrives).view(bits))
    assert torch.equal(found[1, :3].view(bits), weights[1, :3].to(arrives).view(bits))
    assert not found[1, 3:].any()
