"""Functions over the leaves of trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from d9d_core.trees.nodes import close_node, describe, open_node, same_shape, step

#: The type of a tree's containers. What stands at the leaves may change type.
T = TypeVar("T")


def leaves(tree: Any) -> list[Any]:
    """All leaves, in order. ``None`` is no leaf."""
    return [leaf for _, leaf in _walk(tree, "")]


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """All leaves with where they stand, such as ``("labels[0].ids", leaf)``; a lone leaf has the path ``""``."""
    return [(path.removeprefix("."), leaf) for path, leaf in _walk(tree, "")]


def map_tree(function: Callable[[Any], Any], tree: T) -> T:
    """A tree of the same shape with ``function(leaf)`` at its leaves. ``None`` stays ``None``."""
    return zip_map(function, tree)


def zip_map(function: Callable[..., Any], tree: T, *others: Any, name: str = "tree") -> T:
    """A tree of the same shape with ``function(leaf, leaf of the second, ...)`` at its leaves.

    Args:
        function: gets one leaf of each tree.
        tree: decides the order of keys and of calls.
        others: trees of the same shape; their dicts may have another order of keys.
        name: what messages call the tree.

    Raises:
        ValueError: the shapes differ; names the place.
    """
    result: T = _zip(function, (tree, *others), name)
    return result


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    node = open_node(tree)
    if node is None:
        yield path, tree
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _walk(child, path + step(node.kind, key))


def _zip(function: Callable[..., Any], trees: tuple[Any, ...], path: str) -> Any:
    nodes = [open_node(tree) for tree in trees]
    first = nodes[0]
    for tree, node in zip(trees, nodes, strict=True):
        if not same_shape(first, node):
            raise ValueError(
                f"{path}: trees of different shapes: {describe(trees[0], first)} and {describe(tree, node)}; "
                "give trees with the same containers and keys"
            )
    if first is None:
        return function(*trees)
    by_key = [node.by_key for node in nodes if node is not None]
    made = [_zip(function, tuple(of[key] for of in by_key), path + step(first.kind, key)) for key in first.keys]
    return close_node(first.kind, first.keys, made)
