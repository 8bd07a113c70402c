"""Trees: mappings, lists and tuples of leaves, such as a pack, which is a list of mappings of tensors.

Start here: :func:`map_tree` applies a function to all leaves, :func:`leaves` lists them::

    from d9d_core.trees import map_tree

    assert map_tree(lambda leaf: 2 * leaf, [{"x": 1}, {"x": 2}]) == [{"x": 2}, {"x": 4}]

All other objects, also ``None``, are leaves. Mappings become dicts in the order of the first tree. torch is imported
only when tensors are split, joined or stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Structure", "flatten", "join", "leaves", "leaves_with_paths", "map_tree", "path_text", "split", "stack",
]  # fmt: skip

#: Tree of leaves; Python has no type for it that mypy would infer.
Tree = Any
#: Keys and indices from the root to a leaf.
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of a tree without its leaves. Made by :func:`flatten`.

    Attributes:
        tree: the tree, with the index of each leaf in place of the leaf.
    """

    tree: Tree

    def unflatten(self, values: Iterable[Any]) -> Tree:
        """Make a tree of this structure from leaves.

        Args:
            values: leaves in the order of :func:`flatten`.

        Raises:
            ValueError: the number of values differs from the number of leaves.
        """
        given = list(values)
        count = sum(1 for _ in leaves(self.tree))
        if len(given) != count:
            raise ValueError(
                f"the structure has {count} leaves, but {len(given)} values were given; give one for each leaf"
            )
        return map_tree(given.__getitem__, self.tree)


def leaves_with_paths(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves in order, each with its path from the root."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from leaves_with_paths(item, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from leaves_with_paths(item, (*path, index))
    else:
        yield path, tree


def leaves(tree: Tree) -> Iterator[Any]:
    """List the leaves of a tree in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        yield tree
        return
    for item in tree:
        yield from leaves(item)


def path_text(path: Path) -> str:
    """Path in Python syntax: ``[0]['tokens']``."""
    return "".join(f"[{part!r}]" for part in path)


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Call a function with each leaf and the leaves of other trees at the same path; returns the tree of results.

    Args:
        function: takes one leaf of each tree.
        tree: first tree.
        others: trees of the same structure.

    Raises:
        ValueError: the trees have different structures.
    """
    return _mapped(function, tree, others, ())


def flatten(tree: Tree) -> tuple[list[Any], Structure]:
    """Leaves in order, and the structure from which :meth:`Structure.unflatten` rebuilds the tree."""
    found: list[Any] = []

    def number(leaf: Any) -> int:
        found.append(leaf)
        return len(found) - 1

    return found, Structure(map_tree(number, tree))


def split(tree: Tree, dims: Tree, parts: int) -> list[Tree]:
    """Split a tree of tensors into equal parts; the parts share memory with the whole.

    Args:
        tree: tree of tensors.
        dims: dimension along which each tensor is split, or ``None`` to give every part the whole tensor; a single
            value for all tensors, or a mapping or sequence of values for the branches of the tree.
        parts: number of trees to return.

    Raises:
        ValueError: a dimension cannot be split into ``parts`` equal parts, or ``dims`` has other branches than the
            tree.
    """
    cut = _along(lambda dim, path, tensor: _cut(tensor, dim, parts, path), dims, (tree,), ())
    return [map_tree(lambda pieces, index=index: pieces.of[index], cut) for index in range(parts)]


def join(trees: Sequence[Tree], dims: Tree) -> Tree:
    """Join trees of tensors into one; the inverse of :func:`split`.

    Args:
        trees: at least one tree; all have the same structure.
        dims: as for :func:`split`; for ``None``, the first tree's tensor is used.

    Raises:
        ValueError: the trees or ``dims`` have different structures.
    """
    import torch

    return _along(lambda dim, _path, *t: t[0] if dim is None else torch.cat(t, dim), dims, tuple(trees), ())


def stack(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Stack trees of tensors along a new dimension; the tensors at one path have equal shapes.

    Args:
        trees: at least one tree; all have the same structure.
        dim: index of the new dimension.

    Raises:
        ValueError: the trees have different structures.
    """
    import torch

    return map_tree(lambda *tensors: torch.stack(tensors, dim), *trees)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Parts of one tensor, as a class because :func:`map_tree` would treat a tuple as a branch."""

    of: Sequence[Any]


def _cut(tensor: Any, dim: int | None, parts: int, path: Path) -> _Pieces:
    if dim is None:
        return _Pieces([tensor] * parts)
    if tensor.shape[dim] % parts:
        raise ValueError(
            f"tensor {path_text(path)} of shape {list(tensor.shape)}: {parts} parts do not divide dim {dim}; pad it"
        )
    return _Pieces(tensor.chunk(parts, dim) if tensor.shape[dim] else [tensor] * parts)


def _mapped(function: Callable[..., Any], tree: Tree, others: Sequence[Tree], path: Path) -> Tree:
    branches = _branches(tree)
    if branches is None:
        if found := next((other for other in others if _branches(other) is not None), None):
            kind = type(found).__name__
            raise ValueError(f"trees differ at {path_text(path) or 'the root'}: one has a leaf, another a {kind}")
        return function(tree, *others)
    below = [_same_branches(branches, other, path) for other in others]
    made = {key: _mapped(function, item, [b[key] for b in below], (*path, key)) for key, item in branches.items()}
    return _rebuilt(tree, made)


def _along(function: Callable[..., Any], dims: Tree, trees: tuple[Tree, ...], path: Path) -> Tree:
    """Call a function for each leaf, with its dimension and path; a dimension holds for all branches below it."""
    of = _branches(dims)
    branches = _branches(trees[0])
    if branches is None or of is None:
        if of is not None:
            raise ValueError(f"dims has branches at {path_text(path) or 'the root'}, where the tree has a leaf")
        if branches is None:
            return function(dims, path, *trees)
    below = [_same_branches(branches, tree, path) for tree in trees]
    wanted = dict.fromkeys(branches, dims) if of is None else _same_branches(branches, dims, path)
    made = {key: _along(function, wanted[key], tuple(b[key] for b in below), (*path, key)) for key in branches}
    return _rebuilt(trees[0], made)


def _branches(tree: Tree) -> Mapping[Any, Tree] | None:
    """Children of a tree node by key or index; ``None`` for a leaf."""
    if isinstance(tree, Mapping):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else None


def _same_branches(branches: Mapping[Any, Tree], other: Tree, path: Path) -> Mapping[Any, Tree]:
    found = _branches(other)
    if found is None or found.keys() != branches.keys():
        has = "a leaf" if found is None else f"{[*found]}"
        raise ValueError(f"trees differ at {path_text(path) or 'the root'}: {[*branches]} and {has}")
    return found


def _rebuilt(tree: Tree, made: Mapping[Any, Tree]) -> Tree:
    if isinstance(tree, Mapping):
        return made
    if isinstance(tree, list):
        return [*made.values()]
    return type(tree)(*made.values()) if hasattr(tree, "_fields") else tuple(made.values())
