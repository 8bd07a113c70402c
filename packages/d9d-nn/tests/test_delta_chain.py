"""Gated DeltaNet and Mamba-2 over ranks with two chunks of each sample: results of whole samples, constant bytes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Literal

import pytest
import torch
from d9d_core.strategy import StepShape
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_nn.state_space.mamba2 import Mamba2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

Kind = Literal["gated_delta_net", "mamba2"]
KINDS: tuple[Kind, ...] = ("gated_delta_net", "mamba2")
HIDDEN, HEADS = 6, {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}
STATES = {"heads": 4, "head_dim": 5, "groups": 2, "state_dim": 3}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


class Meeting:
    """Ranks as threads of this process: gathered tensors stay in one graph, so gradients need no communication."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = Barrier(ranks, timeout=60)
        self.sent: list[Tensor | None] = [None] * ranks
        self.bytes = 0


class Share:
    """Zigzag positions of one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.ranks = meeting, rank, meeting.ranks

    def own(self, tensor: Tensor) -> Tensor:
        chunks = tensor.chunk(2 * self.ranks, dim=1)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=1)

    def gather(self, tensor: Tensor) -> Tensor:
        meeting = self.meeting
        meeting.sent[self.rank] = tensor
        meeting.barrier.wait()
        halves = [one.chunk(2, dim=1) for one in meeting.sent if one is not None]
        out = torch.cat([*(early for early, _ in halves), *(late for _, late in halves[::-1])], dim=1)
        if self.rank == 0:
            meeting.bytes += out.numel() * out.itemsize
        meeting.barrier.wait()
        return out


def layer(kind: Kind, dtype: torch.dtype = torch.float64, **options: Any) -> GatedDeltaNet | Mamba2:
    torch.manual_seed(0)
    common = {"std": 0.5, "output_std": 0.5, "norm_eps": 1e-6, **options}
    if kind == "gated_delta_net":
        return GatedDeltaNet(HIDDEN, **HEADS, **common).to(dtype)
    return Mamba2(HIDDEN, **STATES, **common).to(dtype)


def over_ranks(
    module: GatedDeltaNet | Mamba2, ranks: int, hidden: Tensor, documents: Tensor | None, *, autocast: bool = False
) -> tuple[Tensor, int]:
    """Output of all positions, and the bytes of the tensors that a rank gathers."""
    meeting = Meeting(ranks)

    def of_rank(rank: int) -> Tensor:
        share, own = Share(meeting, rank), copy.copy(module)
        own.see_context(share)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # of one thread
            out: Tensor = own(share.own(hidden), documents)
        return out

    with ThreadPoolExecutor(ranks) as pool:
        parts = [part.chunk(2, dim=1) for part in pool.map(of_rank, range(ranks))]
    out = torch.cat([*(early for early, _ in parts), *(late for _, late in parts[::-1])], dim=1)
    return out, meeting.bytes


def numbered(starts: list[bool], samples: int, length: int) -> Tensor:
    return torch.tensor((starts * samples * length)[: samples * length]).view(samples, length).cumsum(1)


def with_gradients(out: Tensor, module: nn.Module, hidden: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [hidden, *module.parameters()])]


@of_each_kind
@settings(max_examples=25)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 9),
    samples=st.integers(1, 2),
    starts=st.lists(st.booleans(), min_size=1, max_size=30) | st.none(),
    width=st.integers(2, 5),
)
def test_ranks_compute_what_one_process_does(
    kind: Kind, ranks: int, chunk: int, samples: int, starts: list[bool] | None, width: int
) -> None:
    module, length = layer(kind, width=width), 2 * ranks * chunk
    hidden = torch.randn(samples, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    documents = None if starts is None else numbered(starts, samples, length)
    expected = with_gradients(module(hidden, documents), module, hidden)
    found = with_gradients(over_ranks(module, ranks, hidden, documents)[0], module, hidden)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-7, atol=1e-9)


@of_each_kind
@pytest.mark.parametrize("packed", [False, True])
def test_long_chunks_in_float32_are_close_to_one_process(kind: Kind, packed: bool) -> None:
    module, hidden = layer(kind, torch.float32), torch.randn(1, 4 * 150, HIDDEN)
    numbers = (torch.arange(600) // 290)[None] if packed else None
    found, expected = over_ranks(module, 2, hidden, numbers)[0], module(hidden, numbers)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@of_each_kind
def test_autocast_rounds_as_much_over_ranks_as_in_one_process(kind: Kind) -> None:
    module, hidden = layer(kind, torch.float32), torch.randn(2, 48, HIDDEN)
    exact = module(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        alone = module(hidden)
        meeting = over_ranks(module, 2, hidden, None, autocast=True)[0]
    assert (meeting - alone).norm() < 0.2 * (alone - exact).norm()


def test_ranks_call_the_kernel_that_is_bound_to_their_slot() -> None:
    module = layer("gated_delta_net")
    hidden, plain = torch.randn(1, 16, HIDDEN, dtype=torch.float64), module.gated_delta_rule_from.function
    expected, calls = over_ranks(module, 2, hidden, None)[0], []

    def rule(state: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        calls.append(tuple(state.shape))
        out: tuple[Tensor, Tensor] = plain(state, *tensors)
        return out

    module.gated_delta_rule_from.bind("observed", rule)
    assert torch.equal(over_ranks(module, 2, hidden, None)[0], expected)
    assert calls == [(2, 4, 3, 5 + 3)] * 2
    assert module.gated_delta_rule_from.static == {**HEADS, "value_dim": 5 + 3}


@of_each_kind
def test_no_rank_reads_another_document(kind: Kind) -> None:
    module, documents = layer(kind), torch.tensor([[0] * 7 + [1] + [2] * 16])
    hidden = torch.randn(1, 24, HIDDEN, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, :7] += 1
    before, after = (over_ranks(module, 2, x, documents)[0] for x in (hidden, changed))
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert not torch.allclose(before[:, :7], after[:, :7])


@of_each_kind
@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanged_bytes_do_not_depend_on_the_length_and_are_declared(kind: Kind, ranks: int) -> None:
    module = layer(kind, torch.float32)
    found = [over_ranks(module, ranks, torch.randn(3, length, HIDDEN), None)[1] for length in (32, 320)]
    assert found[0] == found[1]
    before, ends = 3 * {"gated_delta_net": 2 * 2 * 3 + 4 * 5, "mamba2": 4 * 5 + 2 * 2 * 3}[kind], 3 * 2 * ranks * 4
    states = {"gated_delta_net": 4 * 3 * (5 + 3), "mamba2": 4 * (3 * 5 + 1)}[kind]  # a transition is one number
    assert found[0] == ends * (before + states)
    module.see_context(Share(Meeting(ranks), 0))
    assert list(module.op_slots()) == (["gated_delta_rule_from"] if kind == "gated_delta_net" else [])
    for positions in (32 // ranks, None):
        step = StepShape(("forward", "backward"), samples=3, positions=positions, itemsize=4)
        calls = list(module.context_collectives(step))
        assert sum(call.bytes or 0 for call in calls if not call.backward) == found[0]
        assert [(call.kind, call.bytes) for call in calls if call.backward] == [
            ("reduce_scatter", call.bytes) for call in calls if not call.backward
        ]
