from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from d9d_core.trees import Structure, flatten, leaves, leaves_with_path, map_tree, unflatten, zip_map
from d9d_core.trees.split import Replicated, Split, SplitList, join, split
from hypothesis import given, settings
from hypothesis import strategies as st

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True, slots=True)
class Frozen:
    ids: Any
    mask: Any = None


@dataclass
class Checked:
    size: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.size


TREE = {"b": [1, (2, None)], "a": Pair(3, Frozen([4], {"x y": 5, 0: 6})), "c": Checked(7)}


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.dictionaries(st.sampled_from(["a", "b", "c d", 0]), children, max_size=3)
        | st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.builds(Pair, children, children)
        | st.builds(Frozen, children, children)
        | st.none()
    )


trees = st.recursive(st.integers() | st.text(max_size=2), containers, max_leaves=12)


# --- walking


@settings(max_examples=60, deadline=None)
@given(trees)
def test_flattened_trees_are_put_together_again(tree: Any) -> None:
    values, structure = flatten(tree)
    assert unflatten(structure, values) == tree
    assert structure.leaves == len(values) == len(leaves(tree))
    assert flatten(map_tree(str, tree))[1] == structure


@settings(max_examples=60, deadline=None)
@given(trees)
def test_paths_tell_leaves_apart(tree: Any) -> None:
    found = leaves_with_path(tree)
    assert [leaf for _, leaf in found] == leaves(tree)
    assert len({path for path, _ in found}) == len(found)


def test_paths_read_like_code() -> None:
    assert [path for path, _ in leaves_with_path(TREE)] == [
        "b[0]", "b[1][0]", "a.left", "a.right.ids[0]", "a.right.mask['x y']", "a.right.mask[0]", "c.size", "c.double",
    ]  # fmt: skip
    assert leaves_with_path(5) == [("", 5)]


def test_mapping_keeps_types_order_and_none() -> None:
    mapped = map_tree(lambda leaf: -leaf, TREE)
    assert list(mapped) == ["b", "a", "c"]
    assert mapped["b"] == [-1, (-2, None)]
    assert mapped["a"] == Pair(-3, Frozen([-4], {"x y": -5, 0: -6}))
    assert (mapped["c"].size, mapped["c"].double) == (-7, -14)


def test_dataclasses_are_rebuilt_without_their_constructor() -> None:
    mapped = map_tree(lambda _leaf: None, Checked(7))  # the constructor cannot double None
    assert (mapped.size, mapped.double) == (None, None)


def test_subclasses_of_containers_and_types_are_leaves() -> None:
    odd = [OrderedDict(a=1), torch.Size([2]), Frozen]
    assert leaves(odd) == odd


def test_zipping_matches_keys_and_not_their_order() -> None:
    zipped = zip_map(lambda *leaf: leaf, {"a": 1, "b": [2]}, {"b": [20], "a": 10})
    assert zipped == {"a": (1, 10), "b": [(2, 20)]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": 1, "b": [2, 3]}, r"^batch\.b: .*a list of 1 and a list of 2"),
        ({"a": 1, "b": (2,)}, r"^batch\.b: .*a list of 1 and a tuple of 1"),
        ({"a": 1, "b": [None]}, r"^batch\.b\[0\]: .*an int and None"),
        ({"a": 1, "c": [2]}, r"^batch: .*a dict with a, b and a dict with a, c"),
        (5, r"^batch: .*a dict with a, b and an int"),
    ],
)
def test_zipping_different_shapes_names_the_place(second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zip_map(max, {"a": 1, "b": [2]}, second, name="batch")


def test_structures_compare_as_shapes() -> None:
    first, same, other = (flatten(tree)[1] for tree in ({"a": 1, "b": [2]}, {"b": [0], "a": 0}, {"a": 1, "b": (2,)}))
    assert (first, hash(first)) == (same, hash(same))
    assert first not in (other, Structure(None), 5)


@pytest.mark.parametrize("count", [1, 3])
def test_unflattening_needs_exactly_the_leaves(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} leaves for a tree of 2"):
        unflatten(flatten([1, {"a": 2}])[1], range(count))


# --- dividing


def batch(rows: int) -> dict[str, Any]:
    return {
        "tokens": torch.arange(rows * 3).reshape(rows, 3),
        "names": [f"row {i}" for i in range(rows)],
        "labels": Frozen([torch.arange(rows), torch.arange(2 * rows).reshape(2, rows)]),
        "scale": torch.tensor(2.0),
        "extra": None,
        "ids": tuple(range(rows)),
    }


SPEC = {
    "ids": SplitList(),
    "scale": Replicated(),
    "tokens": Split(0),
    "names": SplitList(),
    "labels": Split(-1),
    "extra": None,
}


def assert_equal(first: Any, second: Any) -> None:
    def check(one: Any, other: Any) -> None:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    zip_map(check, first, second)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 4))
def test_divided_batches_join_to_what_they_were(rows: int, parts: int) -> None:
    whole = batch(rows)
    pieces = split(whole, SPEC, parts, even=False)
    assert_equal(join(pieces, SPEC), whole)
    sizes = [len(piece["names"]) for piece in pieces]
    assert sizes == [len(piece["tokens"]) for piece in pieces] == [piece["labels"].ids[1].shape[1] for piece in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    if rows % parts == 0:
        assert_equal(split(whole, SPEC, parts), pieces)


def test_parts_are_views_and_replicas_are_shared() -> None:
    whole = batch(4)
    first, second = split(whole, SPEC, 2)
    assert second["tokens"].data_ptr() == whole["tokens"][2:].data_ptr()
    assert first["scale"] is second["scale"] is whole["scale"]
    assert (first["ids"], second["names"], first["extra"]) == ((0, 1), ["row 2", "row 3"], None)


def test_one_rule_holds_for_the_whole_batch() -> None:
    pieces = split({"a": torch.zeros(4), "b": [torch.zeros(2, 3), None]}, Split(), 2)
    assert [piece["a"].shape[0] for piece in pieces] == [2, 2]
    assert [tuple(piece["b"][0].shape) for piece in pieces] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("tree", "spec", "message"),
    [
        ({"x": torch.zeros(2, 5)}, Split(1), r"^batch\.x: size 5 of dimension 1 is no multiple of 2 parts"),
        ({"x": [1, 2, 3]}, {"x": SplitList()}, r"^batch\.x: a length of 3 is no multiple of 2 parts"),
        ({"x": [torch.zeros(4), "a"]}, Split(), r"^batch\.x\[1\]: a str has no dimension to split; use Replicated"),
        ({"x": torch.zeros(())}, Split(), r"^batch\.x: a tensor of shape \(\) has no dimension 0"),
        ({"x": 5}, SplitList(), r"^batch\.x: an int is no list"),
        ({"x": 5, "y": 6}, {"x": Replicated()}, r"^batch: the spec has a dict with x, the tree has a dict with x, y"),
        ({"x": None}, {"x": [Split()]}, r"^batch\.x: the spec has a list of 1, the tree has None"),
        ({"x": 5}, {"x": 0}, r"^batch\.x: the spec has an int, the tree has an int; write a rule"),
    ],
)
def test_what_cannot_be_divided_is_named(tree: Any, spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(tree, spec, 2)


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot make 0 parts"):
        split({}, Split(), 0)
    with pytest.raises(ValueError, match="no parts to join"):
        join([], Split())


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": torch.zeros(2, 4)}, r"^batch\.x: cannot join tensors of shapes \(2, 3\), \(2, 4\) along 0"),
        ({"x": None}, r"^batch\.x: parts of different shapes: a Tensor and None"),
        ({"y": torch.zeros(2, 3)}, r"^batch: parts of different shapes"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join([{"x": torch.zeros(2, 3)}, second], Split())
