"""Checkpoints that come in more than one layout: the one that is there is read, and what fits none is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Connect, Prefix
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.graph.mappers import Identity, Rename, Transpose
from d9d_weights.graph.merging import Chunk, Stack, Unstack
from d9d_weights.graph.select import Drop, Either
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.smoke


def apart(experts: int) -> Mapper:
    return Parallel(
        *(Stack([f"{e}.{m}" for e in range(experts)], m) >> Transpose(m) for m in ("gate", "up")),
    )


def fused() -> Mapper:
    return Chunk("gate_up", ("gate", "up"), dim=1) >> Parallel(Transpose("gate"), Transpose("up"))


def numbers(*shape: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def banks(layer: int, experts: int, inside: int, hidden: int) -> dict[str, Tensor]:
    shape = (experts, hidden, inside)
    return {f"ours.{layer}.{m}": numbers(*shape, start=1000 * layer + 500 * i) for i, m in enumerate(("gate", "up"))}


def specs(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}


@settings(max_examples=60)
@given(
    layouts=st.lists(st.booleans(), min_size=1, max_size=3),
    prefer_fused=st.booleans(),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
def test_each_layer_is_read_in_the_layout_it_has_and_written_in_the_first(
    layouts: Sequence[bool], prefer_fused: bool, sizes: tuple[int, int, int]
) -> None:
    experts, inside, hidden = sizes

    def reading(first_is_fused: bool) -> Mapper:
        both = (fused(), apart(experts)) if first_is_fused else (apart(experts), fused())
        return Parallel(*(Prefix(f"theirs.{n}.", f"ours.{n}.", Either(*both)) for n in range(len(layouts))))

    state = {k: t for n in range(len(layouts)) for k, t in banks(n, experts, inside, hidden).items()}
    files: dict[str, Tensor] = {}
    for layer, is_fused in enumerate(layouts):
        one = Prefix(f"ours.{layer}.", f"theirs.{layer}.", (fused() if is_fused else apart(experts)).inverse())
        files |= map_tensors(one, banks(layer, experts, inside, hidden))
    read = map_tensors(reading(prefer_fused), files)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    written = map_tensors(reading(prefer_fused).inverse(), state)
    assert {name.count(".") for name in written} == {2 if prefer_fused else 3}
    again = map_tensors(reading(not prefer_fused), written)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_windows_are_read_from_the_layout_there_is() -> None:
    state = {"gate": numbers(4, 3, 2), "up": numbers(4, 3, 2, start=50)}
    for layout in (apart(4), fused()):
        files = map_tensors(layout.inverse(), state)
        graph, read = StateGraph(Either(apart(4), fused()), specs_of(files)), 0

        class Source:
            def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
                nonlocal read
                read += into.numel()
                window = tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))
                into.copy_(files[name][window])  # noqa: B023 - called in this round

        into = torch.empty(2, 2, 1)
        graph.outputs["up"].read(Source(), (1, 1, 1), into)
        assert torch.equal(into, state["up"][1:3, 1:3, 1:2])
        assert read == into.numel()


def test_the_first_that_fits_is_taken() -> None:
    graph = StateGraph(Either(Rename("b", "x"), Rename("a", "x"), Parallel(Rename("a", "y"))), specs(a=(1,)))
    assert [(name, value.text()) for name, value in graph.outputs.items()] == [("x", "a")]


@pytest.mark.parametrize(
    ("mapper", "names", "text", "silent"),
    [
        (Either(apart(3), fused()), ("0.gate", "1.gate", "2.gate", "0.up", "2.up"), "needs '1.up'", "gate_up"),
        (Either(fused(), apart(3)), ("0.gate", "1.gate", "2.gate", "0.up", "2.up"), "needs '1.up'", "gate_up"),
        (Either(apart(1), fused()), ("gat_up",), "needs '0.gate'", "'gate_up', which"),
        (Either(fused(), apart(1)), ("gat_up",), "needs 'gate_up', which does not exist; did it mean 'gat_up'?", "'0."),
        (Either(apart(1), fused()), ("0.gate", "0.up", "gate_up"), "no mapper takes 'gate_up'", "needs"),
        (Prefix("m.", "", Either(Rename("a", "x"), Rename("b", "x"))), ("m.c",), "needs 'm.a'", "'m.b'"),
    ],
)  # fmt: skip
def test_what_fits_none_is_refused_as_the_nearest_would(
    mapper: Mapper, names: Sequence[str], text: str, silent: str
) -> None:
    found = specs(**dict.fromkeys(names, (2, 2)))
    with pytest.raises(CheckpointError) as caught:
        StateGraph(mapper, found)
    assert text in str(caught.value)
    assert silent not in str(caught.value)


def test_shapes_choose_too() -> None:
    both = Either(Unstack("w", ["a", "b"]), Unstack("w", ["a", "b", "c"]))
    assert list(StateGraph(both, specs(w=(3, 2))).outputs) == ["a", "b", "c"]


def test_it_waits_its_turn_among_connected_ones() -> None:
    chain = Connect(Either(Rename("p", "end"), Rename("q", "end")), Rename("start", "q"))
    assert StateGraph(chain, specs(start=(1,))).outputs["end"].text() == "start"


def test_it_may_take_the_rest() -> None:
    graph = StateGraph(Parallel(Either(Rename("no", "x"), Identity()), Rename("a", "z")), specs(a=(1,), b=(1,)))
    assert list(graph.outputs) == ["b", "z"]


def test_one_that_may_find_nothing_always_fits() -> None:
    either = Either(Rename("a", "x"), Drop("b", optional=True))
    assert list(StateGraph(either, specs(a=(1,))).outputs) == ["x"]
    assert list(StateGraph(either, specs(b=(1,))).outputs) == []
    assert list(StateGraph(either, {}).outputs) == []


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at least one"):
        Either()
