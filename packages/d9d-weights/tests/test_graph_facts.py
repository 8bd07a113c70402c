"""State graphs' facts about themselves, and the windows in which they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Parallel
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.mappers import Identity
from d9d_weights.graph.merging import Concatenate
from d9d_weights.graph.select import Share
from d9d_weights.hugging_face import load
from torch import Tensor


@pytest.mark.parametrize(
    ("parts", "shown"),
    [(3, "a0, a1, a2"), (4, "a0, a1, ... 1 more, a3"), (5, "a0, a1, ... 2 more, a4")],
)
def test_of_many_concatenated_parts_the_first_two_and_the_last_are_shown(parts: int, shown: str) -> None:
    names = [f"a{i}" for i in range(parts)]
    graph = StateGraph(Concatenate(names, "c"), {name: TensorSpec((1,), torch.float32) for name in names})
    assert graph.outputs["c"].text() == f"concatenate({shown}; 0)"


def test_groups_count_the_bytes_of_their_outputs() -> None:
    sources = {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((5,), torch.bfloat16)}
    graph = StateGraph(Identity(), sources)
    assert [(group.outputs, group.bytes) for group in graph.groups] == [(("a",), 24), (("b",), 10)]


def test_outputs_that_share_any_source_are_one_group() -> None:
    sources = {name: TensorSpec((1,), torch.float32) for name in ("a", "b", "c", "d")}
    twice = Parallel(Share("b", ("b", "also b")), Identity())
    graph = StateGraph(twice >> Parallel(Concatenate(["a", "b", "c"], "abc"), Identity()), sources)
    found = {group.outputs: group.inputs for group in graph.groups}
    assert found == {("abc", "also b"): ("a", "b", "c"), ("d",): ("d",)}


class Source:
    """Zeros that remember how many rows were read from where."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        self.windows.append((offset[0], len(into)))
        into.zero_()


@pytest.mark.parametrize(("limit", "windows"), [(1, [(0, 1), (1, 1), (2, 1)]), (16, [(0, 2), (2, 1)]), (24, [(0, 3)])])
def test_a_large_tensor_is_read_in_windows_of_at_least_a_row(
    monkeypatch: pytest.MonkeyPatch, limit: int, windows: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(load, "_TASK_BYTES", limit)
    source, target = Source(), torch.ones(3, 2)
    graph = StateGraph(Identity(), {"a": TensorSpec((3, 2), torch.float32)})
    load.load_tensors(graph, source, {"a": target}, threads=1)
    assert source.windows == windows
    assert not target.any()
