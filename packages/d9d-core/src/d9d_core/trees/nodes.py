"""What is a container, what is in it, and how to make one like it.

Containers are dicts, lists, tuples, named tuples and instances of dataclasses; ``None`` is a container of nothing, so
that optional fields need no care. Everything else is a leaf, subclasses of dict and list included: nobody says how to
make another one like them. The set is closed on purpose: a registry would be a global.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

#: How one gets from a container to a child: ``.name`` or ``[0]``. A path is a chain of steps.
Step = str


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One container, opened.

    Attributes:
        kind: its type.
        keys: what tells its children apart: keys of a dict, indices, or names of fields.
        children: in the order of ``keys``.
    """

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...]

    @property
    def by_key(self) -> dict[Any, Any]:
        """The children by their keys."""
        return dict(zip(self.keys, self.children, strict=True))


def open_node(tree: Any) -> Node | None:
    """The container's parts, or ``None`` for a leaf."""
    kind = type(tree)
    if tree is None:
        return Node(kind, (), ())
    if kind is dict:
        return Node(kind, tuple(tree), tuple(tree.values()))
    if kind is list or kind is tuple:
        return Node(kind, tuple(range(len(tree))), tuple(tree))
    if is_named_tuple(kind):
        return Node(kind, kind._fields, tuple(tree))
    if dataclasses.is_dataclass(kind):
        names = field_names(kind)
        return Node(kind, names, tuple(getattr(tree, name) for name in names))
    return None


def close_node(kind: Any, keys: Sequence[Any], children: Sequence[Any]) -> Any:
    """A container of this kind with these children; the inverse of :func:`open_node`."""
    if kind is type(None):
        return None
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    if kind is list or kind is tuple:
        return kind(children)
    if is_named_tuple(kind):
        return kind(*children)
    # Not the constructor: it may convert or refuse what are no longer its usual values, and not every field is a
    # parameter of it. Past ``__setattr__``, because the class may be frozen.
    made = kind.__new__(kind)
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def is_named_tuple(kind: type) -> bool:
    """Whether instances are tuples with names."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def field_names(kind: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields, those that its constructor does not take included."""
    return tuple(field.name for field in dataclasses.fields(kind))


def step(kind: type, key: Any) -> Step:
    """How a path writes the way to a child.

    Returns:
        ``.name`` for a field, and for a key that looks like one; ``[0]`` or ``['a b']`` otherwise.
    """
    if isinstance(key, str) and (kind is not dict or key.isidentifier()):
        return f".{key}"
    return f"[{key!r}]"


def same_shape(first: Node | None, second: Node | None) -> bool:
    """Whether two trees agree at this node: both leaves, or equal kinds and equal sets of keys."""
    if first is None or second is None:
        return first is second
    return first.kind is second.kind and len(first.keys) == len(second.keys) and set(first.keys) == set(second.keys)


def describe(tree: Any, node: Node | None) -> str:
    """A tree's outermost level in words, for messages about mismatches."""
    if node is None:
        name = type(tree).__name__
        return f"an {name}" if name[0] in "aeiou" else f"a {name}"
    if tree is None:
        return "None"
    if node.kind is list or node.kind is tuple:
        return f"a {node.kind.__name__} of {len(node.keys)}"
    return f"a {node.kind.__name__} with {', '.join(map(str, node.keys)) or 'nothing'}"
