"""Gated DeltaNet over ranks that have two chunks of each sample: the results of whole samples, by constant bytes."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from d9d_core.strategy import StepShape
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

HIDDEN, HEADS = 6, {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}


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


def layer(dtype: torch.dtype = torch.float64, **options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(HIDDEN, **HEADS, std=0.5, output_std=0.5, norm_eps=1e-6, **options).to(dtype)


def over_ranks(
    module: GatedDeltaNet, ranks: int, hidden: Tensor, documents: Tensor | None, *, autocast: bool = False
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


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 9),
    samples=st.integers(1, 2),
    starts=st.lists(st.booleans(), min_size=1, max_size=30) | st.none(),
    width=st.integers(2, 5),
)
def test_ranks_compute_what_one_process_does(
    ranks: int, chunk: int, samples: int, starts: list[bool] | None, width: int
) -> None:
    module, length = layer(width=width), 2 * ranks * chunk
    hidden = torch.randn(samples, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    documents = None if starts is None else numbered(starts, samples, length)
    expected = with_gradients(module(hidden, documents), module, hidden)
    found = with_gradients(over_ranks(module, ranks, hidden, documents)[0], module, hidden)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_long_chunks_in_float32_are_close_to_one_process(packed: bool) -> None:
    module, hidden = layer(torch.float32), torch.randn(1, 4 * 150, HIDDEN)
    numbers = (torch.arange(600) // 290)[None] if packed else None
    found, expected = over_ranks(module, 2, hidden, numbers)[0], module(hidden, numbers)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_autocast_rounds_as_much_over_ranks_as_in_one_process() -> None:
    module, hidden = layer(torch.float32), torch.randn(2, 48, HIDDEN)
    exact = module(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        alone = module(hidden)
        meeting = over_ranks(module, 2, hidden, None, autocast=True)[0]
    assert (meeting - alone).norm() < 0.2 * (alone - exact).norm()


def test_no_rank_reads_another_document() -> None:
    module, documents = layer(), torch.tensor([[0] * 7 + [1] + [2] * 16])
    hidden = torch.randn(1, 24, HIDDEN, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, :7] += 1
    before, after = (over_ranks(module, 2, x, documents)[0] for x in (hidden, changed))
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert not torch.allclose(before[:, :7], after[:, :7])


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanged_bytes_do_not_depend_on_the_length_and_are_declared(ranks: int) -> None:
    module = layer(torch.float32)
    found = [over_ranks(module, ranks, torch.randn(3, length, HIDDEN), None)[1] for length in (32, 320)]
    assert found[0] == found[1]
    module.see_context(Share(Meeting(ranks), 0))
    assert module.op_slots() == {}
    for positions in (32 // ranks, None):
        step = StepShape(("forward", "backward"), samples=3, positions=positions, itemsize=4)
        calls = list(module.context_collectives(step))
        assert sum(call.bytes or 0 for call in calls if not call.backward) == found[0]
        assert [(call.kind, call.bytes) for call in calls if call.backward] == [
            ("reduce_scatter", call.bytes) for call in calls if not call.backward
        ]
