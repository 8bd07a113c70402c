"""Collectives that d9d explain lists of DeepEP equal the requests to a stand-in for its buffer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.strategy import Collective, StepShape
from d9d_deepep.communication import DeepEPCommunication
from d9d_deepep.dispatcher import DeepEPDispatcher
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.collectives import differences
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist

RANKS, EXPERTS, CHOSEN, FEATURES = (0, 1), 8, 2, 64
STEP = StepShape(("forward", "backward") * 2, samples=4, positions=32, itemsize=2)


def bank(experts: int) -> GroupedSwiGLU:
    return GroupedSwiGLU(FEATURES, 8, experts, std=0.02, output_std=0.02)


def layer() -> MoELayer:
    router = TopKRouter(FEATURES, EXPERTS, top_k=CHOSEN, std=0.02)
    return MoELayer(router, bank(EXPERTS), LocalDispatcher()).bfloat16()


def listed(stage: nn.Module, split: int = 1) -> list[Collective]:
    assert isinstance(stage, MoELayer)
    return list(DeepEPCommunication(stage, {"ffn": stage}, {"ffn": EXPERTS}, RANKS, split)(STEP))


def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_for() -> list[tuple[str, tuple[int, ...], int]]:
    """Calls of the buffer in two microbatches, with the bytes that leave this rank, its own rows among them."""
    found: list[tuple[str, tuple[int, ...], int]] = []
    kind: Any = stand_in().Buffer

    class Counted(kind):
        def dispatch(self, *args: Any, **fields: Any) -> Any:
            self.sent = 0
            done = super().dispatch(*args, **fields)
            found.append(("all_to_all", RANKS, self.sent))
            return done

        def combine(self, *args: Any, **fields: Any) -> Any:
            self.sent = 0
            done = super().combine(*args, **fields)
            found.append(("all_to_all", RANKS, self.sent))
            return done

        def exchange(self, rows: Tensor, *args: Any, **fields: Any) -> Any:
            self.sent += rows.nbytes
            return super().exchange(rows, *args, **fields)

    torch.manual_seed(dist.get_rank())
    stage = layer()
    stage.experts = bank(EXPERTS // len(RANKS)).bfloat16()
    stage.dispatcher = DeepEPDispatcher(dist.group.WORLD, EXPERTS, Counted)
    for _ in range(STEP.forwards):
        hidden = torch.randn(STEP.samples, 32, FEATURES).bfloat16().requires_grad_()
        stage(hidden).sum().backward()
    dist.barrier()
    return found


@pytest.mark.thorough
def test_the_buffer_is_asked_for_what_is_listed() -> None:
    for found in World(2).run(asked_for):
        assert differences(listed(layer()), found) == []
        assert differences(listed(layer())[1:], found), "a dispatch could be left out"


def test_forwards_are_counted_again_in_a_checkpointed_block_and_backwards_of_frozen_layers_may_be_fewer() -> None:
    stage = layer()
    forward, backward = listed(stage)[:2], listed(stage)[2:]
    assert {one.module for one in forward} == {"ffn"}
    assert {one.module for one in backward} == {None}
    assert not any(one.at_most for one in (*forward, *backward))
    stage.router.weight.requires_grad_(False)
    assert [one.at_most for one in listed(stage)] == [False, False, True, True]


@pytest.mark.parametrize("split", [1, 2])
def test_ranks_of_tp_share_the_rows(split: int) -> None:
    positions = STEP.samples * 32 / split
    rows = 2 * (1 - (4 * 3) / (8 * 7))  # both ranks, unless both choices are of the other's four experts
    sizes = [one.bytes for one in listed(layer(), split)]
    assert sizes[1] == sizes[2] == round(positions * rows * FEATURES * 2)
    assert sizes[0] == pytest.approx(positions * rows * (FEATURES * 2 + CHOSEN * 12), abs=1)
    assert sizes[3] == pytest.approx(positions * rows * (FEATURES * 2 + CHOSEN * 4), abs=1)


def test_calls_are_listed_with_their_purpose_and_without_sizes_that_no_router_tells() -> None:
    stage = layer()
    stage.router.top_k = None  # type: ignore[assignment]
    found = listed(stage)
    assert [one.bytes for one in found] == [None] * 4
    assert [(one.kind, one.group, one.ranks, one.count, one.approximate) for one in found] == [
        ("all_to_all", "ep", RANKS, 2, True)
    ] * 4
    assert [one.purpose for one in found] == [
        "tokens of ffn by DeepEP, forward",
        "outputs of ffn by DeepEP, forward",
        "gradients of outputs of ffn by DeepEP, backward",
        "gradients of tokens of ffn by DeepEP, backward",
    ]
    stage = layer()
    stage.experts = nn.Linear(FEATURES, 8)  # type: ignore[assignment] - a bank that declares no features
    rows = 32 * STEP.samples * 2 * (1 - (4 * 3) / (8 * 7))
    assert [one.bytes for one in listed(stage)] == [None] * 4
    sizes = DeepEPCommunication(stage, {"ffn": stage}, {"ffn": EXPERTS}, RANKS, 1)._sizes("ffn", stage, STEP)
    assert sizes == (None, round(rows * CHOSEN * 12), round(rows * CHOSEN * 4))
