"""Tensors that a graph leaves out are listed, and copies are compared with their originals."""

from __future__ import annotations

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.graph.base import Mapper, Parallel, Sequential
from d9d_weights.graph.compose import Connect, Prefix, Shard
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.graph.mappers import Rename
from d9d_weights.graph.select import Copy, Drop, Explained, Rest, Select
from d9d_weights.hugging_face.load import check_duplicates
from torch import Tensor

COPY = Copy("copy", "one", "'copy' would be lost")


class Tensors:
    """Source of tensors in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def read(self, name: str, offset: tuple[int, ...], into: Tensor) -> None:
        window = tuple(slice(first, first + size) for first, size in zip(offset, into.shape, strict=True))
        into.copy_(self.tensors[name][window])


def graph(mapper: Mapper, source: Tensors) -> StateGraph:
    return StateGraph(mapper, specs_of(source.tensors))


@pytest.mark.parametrize(
    "mapper",
    [
        Parallel(COPY, Rename("one", "a")),
        Sequential(Parallel(COPY, Rename("one", "b")), Rename("b", "a")),
        Connect(Parallel(COPY, Rename("one", "b")), Rename("b", "a")),
        Prefix("", "", Parallel(COPY, Rename("one", "a"))),
        Shard(Parallel(COPY, Rename("one", "a")), 0, 2),
    ],
    ids=lambda mapper: type(mapper).__name__,
)
def test_a_copy_that_differs_in_one_number_is_an_error(mapper: Mapper) -> None:
    one = torch.arange(12.0).reshape(3, 4)
    source = Tensors(one=one, copy=one.clone())
    same = graph(mapper, source)
    assert same.left_out == []
    check_duplicates(same, source)
    source.tensors["copy"][2, 3] += 1
    with pytest.raises(CheckpointError, match="'copy' would be lost"):
        check_duplicates(same, source)


@pytest.mark.parametrize(
    ("copy", "equal"),
    [
        (torch.zeros(3), True),
        (-torch.zeros(3), False),
        (torch.zeros(3, dtype=torch.bfloat16), True),
        (torch.zeros(4), False),
        (torch.full((3,), torch.nan), False),
    ],
)
def test_a_copy_is_equal_in_its_bytes_after_conversion(copy: Tensor, equal: bool) -> None:
    source = Tensors(one=torch.zeros(3), copy=copy)
    made = graph(Parallel(COPY, Rename("one", "a")), source)
    if equal:
        check_duplicates(made, source)
    else:
        with pytest.raises(CheckpointError):
            check_duplicates(made, source)


def test_an_absent_copy_is_nothing_and_one_without_its_original_an_error() -> None:
    mapper = Parallel(COPY, Rename("one", "a", optional=True))
    check_duplicates(graph(mapper, source := Tensors(one=torch.zeros(1))), source)
    with pytest.raises(CheckpointError, match="Copy.'copy'. needs 'one'"):
        graph(mapper, Tensors(copy=torch.zeros(1)))


def test_what_no_output_is_made_of_is_left_out_whichever_mapper_took_it() -> None:
    source = Tensors(**{name: torch.zeros(1) for name in ("in.a", "in.b", "c")})
    assert graph(Select("in"), source).left_out == ["c"]
    assert graph(Parallel(Drop("in.{name}"), Rename("c", "c")), source).left_out == ["in.a", "in.b"]


def test_the_rest_is_kept_but_for_ignored_names_that_are_not_known() -> None:
    source = Tensors(**{name: torch.zeros(1) for name in ("a", "mtp.b", "mtp.c", "d")})
    rest = Rest(frozenset({"mtp.c"}), (r"^mtp\.", "x"))
    made = graph(Parallel(Rename("a", "z"), rest), source)
    assert list(made.outputs) == ["z", "mtp.c", "d"]
    assert made.left_out == ["mtp.b"]
    assert list(graph(rest.inverse(), source).outputs) == ["a", "mtp.b", "mtp.c", "d"]
    assert list(graph(Rest(), source).outputs) == ["a", "mtp.b", "mtp.c", "d"]


def test_an_explained_mapper_fails_in_words_of_its_own() -> None:
    with pytest.raises(CheckpointError) as caught:
        graph(Explained(Rename("two", "a"), "the second file lacks"), Tensors(one=torch.zeros(1)))
    assert str(caught.value) == "the tensors of the checkpoint do not fit:\n  the second file lacks"
    assert graph(Explained(Rename("one", "a"), "no"), Tensors(one=torch.zeros(1))).outputs.keys() == {"a"}
    assert graph(Explained(Rename("one", "a"), "no").inverse(), Tensors(a=torch.zeros(1))).outputs.keys() == {"one"}
