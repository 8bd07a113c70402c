"""Interleaved tensors and MXFP4 weights: mapping whole tensors, windows, inverses and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.graph.interleaving import Deinterleave, Interleave
from d9d_weights.graph.mappers import Identity, Transpose
from d9d_weights.graph.mxfp4 import DequantiseMXFP4, dequantise
from torch import Tensor


class Memory:
    """Source of windows of tensors in memory, which records how many elements it read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.elements = tensors, 0

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        window = tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))
        into.copy_(self.tensors[name][window])
        self.elements += into.numel()


def window_of(graph: StateGraph, source: Memory, name: str, *ranges: tuple[int, int]) -> Tensor:
    value = graph.outputs[name]
    into = torch.empty([stop - start for start, stop in ranges], dtype=value.spec.dtype)
    value.read(source, [start for start, _ in ranges], into)
    return into


def test_indices_alternate_between_results_and_come_back() -> None:
    both = {"both": torch.arange(24.0).view(2, 12)}
    split = Deinterleave("both", ("a", "b", "c"), dim=1)
    found = map_tensors(split, both)
    assert found["b"].tolist() == [[1, 4, 7, 10], [13, 16, 19, 22]]
    assert torch.equal(map_tensors(split.inverse(), found)["both"], both["both"])
    assert isinstance(split.inverse().inverse(), Deinterleave)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_windows_are_those_of_whole_tensors(dim: int, first: int) -> None:
    wide = {"w": torch.randn(8, 8)}
    graph = StateGraph(Deinterleave("w", ("a", "b"), dim=dim), specs_of(wide))
    whole, ranges = graph.apply(wide)["b"], [(1, 3), (1, 3)]
    ranges[dim] = (first, 4)
    window = tuple(slice(*one) for one in ranges)
    assert torch.equal(window_of(graph, Memory(wide), "b", *ranges), whole[window])
    parts = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.randn(4, 4)}
    graph = StateGraph(Interleave(("a", "b", "c"), "w", dim=dim), specs_of(parts))
    whole, ranges = graph.apply(parts)["w"], [(1, 3), (1, 3)]
    for last in range(first, 12):  # also windows without a part
        ranges[dim] = (first, last)
        window = tuple(slice(*one) for one in ranges)
        assert torch.equal(window_of(graph, Memory(parts), "w", *ranges), whole[window])


def test_a_mapper_and_its_inverse_leave_the_source() -> None:
    specs = {"w": TensorSpec((4, 6), torch.float32)}
    there = Deinterleave("w", ("a", "b"), dim=1)
    (value,) = StateGraph(there >> there.inverse(), specs).outputs.values()
    assert value.text() == "w"
    back = Interleave(("a", "b"), "w", dim=1)
    graph = StateGraph(back >> back.inverse(), {"a": specs["w"], "b": specs["w"]})
    assert [value.text() for value in graph.outputs.values()] == ["a", "b"]
    assert StateGraph(there, specs).outputs["b"].text() == "w[:, 1::2]"


def packed(*shape: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    groups = (*shape[:-1], shape[-1] // 32)
    return {
        "w_blocks": torch.randint(256, (*groups, 16), generator=draws).to(torch.uint8),
        "w_scales": torch.randint(100, 140, groups, generator=draws).to(torch.uint8),
    }


def test_codes_are_signed_numbers_with_a_shared_exponent() -> None:
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).view(1, 1, 16)
    numbers = dequantise(blocks, torch.tensor([[128]], dtype=torch.uint8))
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert numbers.flatten().tolist()[:16] == [2 * one for one in (*positive, *(-one for one in positive))]
    assert torch.equal(numbers.bfloat16().float(), numbers)


@pytest.mark.parametrize("part", [1, 2**24])
def test_windows_of_dequantised_weights_read_their_groups_only(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr("d9d_weights.graph.mxfp4._PART", part)
    files = packed(3, 4, 128)
    graph = StateGraph(DequantiseMXFP4("w") >> Transpose("w"), specs_of(files))
    whole = graph.apply(files)["w"]
    assert whole.shape == (3, 128, 4)
    assert whole.dtype == torch.bfloat16
    for columns in ((0, 128), (5, 40), (64, 96), (127, 128)):
        assert torch.equal(
            window_of(graph, Memory(files), "w", (1, 3), columns, (1, 2)), whole[1:3, slice(*columns), 1:2]
        )
    source = Memory(files)
    window_of(graph, source, "w", (0, 1), (33, 60), (0, 1))
    assert source.elements == 17  # one group and its scale


def test_an_export_keeps_the_weight_as_it_is() -> None:
    weights = {"w": torch.randn(2, 64)}
    assert map_tensors(DequantiseMXFP4("w").inverse(), weights)["w"] is weights["w"]


REFUSED: list[tuple[Callable[[], Mapper], dict[str, tuple[int, ...]], str]] = [
    (lambda: Deinterleave("w", ("a", "b"), dim=1), {"w": (2, 3)}, r"dimension 1 of \[2, 3\] does not alternate 2"),
    (lambda: Deinterleave("w", ("a", "b"), dim=2), {"w": (2, 2)}, r"dimension 2 of \[2, 2\]"),
    (lambda: Deinterleave("w", ("a", "a")), {"w": (2,)}, "has the result 'a' twice"),
    (lambda: Deinterleave("w", ("a", "b")), {"v": (2,)}, r"Deinterleave\('w'\) needs 'w'"),
    (lambda: Interleave(("a", "b"), "w"), {"a": (2,), "b": (3,)}, r"'b' is torch.float32 \[3\]"),
    (lambda: Interleave(("a", "b"), "w", dim=1), {"a": (2,), "b": (2,)}, r"of the shape \[2\] have no dimension 1"),
    (lambda: Parallel(Interleave((), "w"), Identity()), {"a": (2,)}, "needs at least one tensor"),
    (lambda: DequantiseMXFP4("w"), {"w_blocks": (2, 1, 16), "w_scales": (2, 1)}, "blocks are torch.float32"),
    (lambda: DequantiseMXFP4("w"), {"w_blocks": (2, 1, 16)}, "needs 'w_scales'"),
]


@pytest.mark.parametrize(("mapper", "shapes", "said"), REFUSED)
def test_tensors_that_do_not_fit_are_refused(
    mapper: Callable[[], Mapper], shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        StateGraph(mapper(), {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()})


@pytest.mark.parametrize("shape", [(2, 1, 15), (2, 2, 16)])
def test_blocks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    specs = {"w_blocks": TensorSpec(shape, torch.uint8), "w_scales": TensorSpec((2, 1), torch.uint8)}
    with pytest.raises(CheckpointError, match=r"MXFP4 has uint8 \[..., groups, 16\]"):
        StateGraph(DequantiseMXFP4("w"), specs)
