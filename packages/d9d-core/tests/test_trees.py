"""Trees: every leaf is reached once and in order, structures survive, and what differs is named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from d9d_core.trees import flatten, join, leaves, leaves_with_paths, map_tree, path_text, split, stack


class Pair(NamedTuple):
    left: Any
    right: Any


TREE = {"a": [1, (2, None)], "b": Pair({"c": "text"}, []), "d": 3}


def test_leaves_come_in_order_with_their_paths() -> None:
    assert list(leaves(TREE)) == [1, 2, None, "text", 3]
    assert dict(leaves_with_paths(TREE)) == {
        ("a", 0): 1, ("a", 1, 0): 2, ("a", 1, 1): None, ("b", 0, "c"): "text", ("d",): 3,
    }  # fmt: skip
    assert path_text(("a", 1, 0)) == "['a'][1][0]"


def test_a_function_sees_the_leaves_of_all_trees_in_one_place() -> None:
    found = map_tree(lambda one, other: (one, other), TREE, TREE)
    assert found["b"] == Pair({"c": ("text", "text")}, [])
    assert isinstance(found["a"][1], tuple)
    assert list(leaves(map_tree(str, TREE))) == ["1", "2", "None", "text", "3"]


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"a": [1, (2, None)]}, "the root"),
        ({**TREE, "a": [1]}, r"\['a'\]"),
        ({**TREE, "d": [3]}, r"\['d'\]: one has a leaf, another a list"),
        ({**TREE, "a": 1}, r"\['a'\]: \[0, 1\] and a leaf"),
    ],
)
def test_trees_of_other_structures_are_refused_with_the_place(other: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"trees differ at {where}"):
        map_tree(lambda *_: None, TREE, other)


def test_a_structure_is_filled_again() -> None:
    values, structure = flatten(TREE)
    assert structure.unflatten(values) == TREE
    assert structure.unflatten(range(5))["a"] == [0, (1, 2)]
    with pytest.raises(ValueError, match="has 5 leaves, but 2 values"):
        structure.unflatten([1, 2])


def test_what_is_split_is_joined_again() -> None:
    tree = {"x": torch.arange(12).view(2, 6), "y": [torch.arange(4), torch.tensor(7)]}
    dims = {"x": 1, "y": [0, None]}
    parts = split(tree, dims, 2)
    assert parts[1]["x"].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert parts[1]["y"][0].tolist() == [2, 3]
    assert parts[0]["y"][1] is parts[1]["y"][1] is tree["y"][1]
    joined = join(parts, dims)
    assert all(torch.equal(one, other) for one, other in zip(leaves(joined), leaves(tree), strict=True))


def test_one_dimension_counts_for_all_below_it_and_empty_tensors_split() -> None:
    tree = [{"x": torch.zeros(4, 0)}, torch.zeros(0)]
    assert [tuple(leaf.shape) for leaf in leaves(split(tree, 0, 2)[0])] == [(2, 0), (0,)]


def test_what_cannot_be_split_is_refused_with_the_place() -> None:
    with pytest.raises(ValueError, match=r"tensor \['x'\] of shape \[3\]: 2 parts do not divide dim 0"):
        split({"x": torch.zeros(3)}, 0, 2)
    with pytest.raises(ValueError, match="dims has branches at the root"):
        split(torch.zeros(2), {"x": 0}, 2)
    with pytest.raises(ValueError, match="trees differ at the root"):
        split({"x": torch.zeros(2)}, {"z": 0}, 2)


def test_trees_are_stacked_along_a_new_dimension() -> None:
    trees = [{"x": torch.full((2,), float(number))} for number in range(3)]
    assert stack(trees)["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stack(trees, dim=1)["x"].shape == (2, 3)


def test_trees_load_without_torch() -> None:
    code = "import sys, d9d_core.trees as t; print([*t.leaves({'a': [1]})], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1] False\n"
