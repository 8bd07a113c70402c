"""Whether ranks can use memory of each other: the questions and their order, without GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_parallel.tensor_parallel import symmetric_memory
from d9d_parallel.tensor_parallel.symmetric_memory import is_expected, is_usable


@pytest.mark.parametrize(
    ("kind", "size", "backend", "node", "memory", "met", "usable", "asked"),
    [
        ("cpu", 2, "nccl", True, "memory", True, False, []),
        ("cuda", 1, "nccl", True, "memory", True, False, []),
        ("cuda", 2, "fake", True, "memory", True, False, []),
        ("cuda", 2, "nccl", False, "memory", True, False, ["node"]),
        ("cuda", 2, "nccl", True, None, True, False, ["node", "memory", "smallest 0"]),
        ("cuda", 2, "nccl", True, "memory", False, False, ["node", "memory", "smallest 1", "met", "smallest 0"]),
        ("cuda", 2, "nccl", True, "memory", True, True, ["node", "memory", "smallest 1", "met", "smallest 1"]),
    ],
)
def test_memory_of_others_is_looked_for_only_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: int,
    backend: str,
    node: bool,
    memory: str | None,
    met: bool,
    usable: bool,
    asked: list[str],
) -> None:
    ranks: Any = SimpleNamespace(size=size, group="group")
    device, seen = torch.device(kind), list[str]()

    def said(word: str, answer: Any, *expected: object) -> Any:
        def function(*given: object) -> Any:
            assert given[-len(expected) :] == expected
            seen.append(word)
            return answer

        return function

    def smallest(value: object, *given: object) -> int:
        assert given == (ranks, device)
        seen.append(f"smallest {int(bool(value))}")
        return int(bool(value))

    monkeypatch.setattr(symmetric_memory.dist, "get_backend", lambda _group: backend)
    monkeypatch.setattr(symmetric_memory, "_same_on_all", said("node", node, ranks, device))
    monkeypatch.setattr(symmetric_memory, "_memory", said("memory", memory, ranks, device))
    monkeypatch.setattr(symmetric_memory, "_met", said("met", met, memory, ranks))
    monkeypatch.setattr(symmetric_memory, "_smallest", smallest)
    assert is_usable(ranks, device) == usable
    assert seen == asked


@pytest.mark.parametrize(
    ("numbers", "kind", "local", "devices", "expected"),
    [
        ((0, 1), "cpu", "2", 0, False),
        ((0,), "cuda", "2", 0, False),
        ((0, 1), "cuda", "", 0, True),
        ((2, 3), "cuda", "", 1, True),
        ((2, 3), "cuda", "2", 8, True),
        ((1, 2), "cuda", "2", 8, False),
        ((0, 1), "cuda", "1", 8, False),
        ((6, 7), "cuda", "", 8, True),
        ((7, 8), "cuda", "", 8, False),
    ],
)
def test_gpus_of_one_node_are_expected_to_reach_each_others_memory(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], kind: str, local: str, devices: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert is_expected(numbers, torch.device(kind), {"LOCAL_WORLD_SIZE": local}) is expected
