"""A tree as a row of leaves and the shape that they stood in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from d9d_core.trees.nodes import close_node, open_node


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The shape of a tree, without its leaves. Equal shapes are equal; the order of a dict's keys does not count.

    Attributes:
        kind: type of the outermost container; ``None`` for a leaf.
        keys: keys of its children, in their order.
        children: their shapes.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def leaves(self) -> int:
        """How many leaves it takes."""
        return 1 if self.kind is None else sum(child.leaves for child in self.children)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self.kind is other.kind and self._children() == other._children()

    def __hash__(self) -> int:
        return hash((self.kind, frozenset(self._children().items())))

    def _children(self) -> dict[Any, Structure]:
        return dict(zip(self.keys, self.children, strict=True))


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take a tree apart: its leaves in order (dicts in that of insertion), and its shape."""
    found: list[Any] = []
    return found, _flatten(tree, found)


def unflatten(structure: Structure, values: Iterable[Any]) -> Any:
    """Put leaves back into a shape; the inverse of :func:`flatten`.

    Raises:
        ValueError: there are more or fewer leaves than the shape takes.
    """
    values = list(values)
    if len(values) != structure.leaves:
        raise ValueError(f"{len(values)} leaves for a tree of {structure.leaves}; give one for each")
    return _unflatten(structure, iter(values))


def _flatten(tree: Any, found: list[Any]) -> Structure:
    node = open_node(tree)
    if node is None:
        found.append(tree)
        return Structure(None)
    return Structure(node.kind, node.keys, tuple(_flatten(child, found) for child in node.children))


def _unflatten(structure: Structure, values: Iterator[Any]) -> Any:
    if structure.kind is None:
        return next(values)
    return close_node(structure.kind, structure.keys, [_unflatten(child, values) for child in structure.children])
