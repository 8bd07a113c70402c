"""Dividing a batch into microbatches or among ranks, and putting the parts together again.

A spec is a tree of the batch's shape, or of its outer levels only, with a rule at each leaf. A rule holds for all that
is below it: ``Split(0)`` alone divides every tensor of a batch. ``None`` stands where the batch has ``None``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from d9d_core.trees.nodes import Node, close_node, describe, open_node, same_shape, step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """Tensors are divided along a dimension; negative ones count from the end."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class SplitList:
    """Lists and tuples are divided; what is in them stays whole."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every part gets the whole, the same object."""


Rule = Split | SplitList | Replicated
#: (rule, the value in each tree, path) -> the value in each result.
_Act = Callable[[Rule, Sequence[Any], str], list[Any]]


def split(tree: T, spec: Any, parts: int, *, even: bool = True, name: str = "batch") -> list[T]:
    """Divide a tree into ``parts`` of the same shape.

    Args:
        tree: what to divide.
        spec: a rule for all of it, or a tree of rules.
        parts: how many to make.
        even: false lets the first parts be one longer, and the last ones empty, where a size is no multiple.
        name: what messages call the tree.

    Returns:
        The parts in order. Their tensors are views of the tree's.

    Raises:
        ValueError: a size is no multiple of ``parts``, or spec and tree do not fit together; names the place.
    """
    if parts < 1:
        raise ValueError(f"{name}: cannot make {parts} parts; at least 1")

    def divide(rule: Rule, values: Sequence[Any], path: str) -> list[Any]:
        value = values[0]
        if isinstance(rule, Replicated):
            return [value] * parts
        size = value.shape[rule.dim] if isinstance(rule, Split) else len(value)
        if even and size % parts:
            what = f"size {size} of dimension {rule.dim}" if isinstance(rule, Split) else f"a length of {size}"
            raise ValueError(
                f"{path}: {what} is no multiple of {parts} parts; change the size or the number of parts, "
                "or allow parts of unequal sizes (even=False)"
            )
        if isinstance(rule, Split):
            return list(torch.tensor_split(value, parts, rule.dim))
        base, longer = divmod(size, parts)
        bounds = [part * base + min(part, longer) for part in range(parts + 1)]
        return [value[begin:end] for begin, end in itertools.pairwise(bounds)]

    return _apply(divide, spec, [tree], name, parts)


def join(trees: Sequence[T], spec: Any, *, name: str = "batch") -> T:
    """Put parts together: tensors and lists one after another, of what is replicated the first. Undoes :func:`split`.

    Args:
        trees: the parts in order, of the same shape; at least one.
        spec: what they were divided by.
        name: what messages call the tree.

    Raises:
        ValueError: there is no part, or the parts do not fit together; names the place.
    """
    if not trees:
        raise ValueError(f"{name}: there are no parts to join; give at least one")

    def unite(rule: Rule, values: Sequence[Any], path: str) -> list[Any]:
        if isinstance(rule, Replicated):
            return [values[0]]
        if isinstance(rule, SplitList):
            return [type(values[0])(item for value in values for item in value)]
        try:
            return [torch.cat(list(values), rule.dim)]
        except (RuntimeError, TypeError) as error:
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(f"{path}: cannot join tensors of shapes {shapes} along {rule.dim}: {error}") from error

    (joined,) = _apply(unite, spec, trees, name, 1)
    whole: T = joined
    return whole


def _apply(act: _Act, spec: Any, trees: Sequence[Any], path: str, results: int) -> list[Any]:
    """Walk spec and trees together; where a rule meets its kind of value, ``act`` gives ``results`` values."""
    nodes = [open_node(tree) for tree in trees]
    first = nodes[0]
    if isinstance(spec, Rule):
        if _meets(spec, trees, nodes, path):
            return act(spec, trees, path)
    elif first is None or not same_shape(open_node(spec), first):
        wanted = describe(spec, open_node(spec))
        raise ValueError(
            f"{path}: the spec has {wanted}, the tree has {describe(trees[0], first)}; write a rule "
            "(Split, SplitList, Replicated) for the whole, or a spec with the same containers and keys"
        )
    for tree, node in zip(trees, nodes, strict=True):
        if not same_shape(first, node):
            raise ValueError(
                f"{path}: parts of different shapes: {describe(trees[0], first)} and {describe(tree, node)}"
            )
    assert first is not None  # else a rule would have acted
    by_key = [node.by_key for node in nodes if node is not None]
    rules = dict.fromkeys(first.keys, spec) if isinstance(spec, Rule) else _opened(spec).by_key
    columns = [
        _apply(act, rules[key], [of[key] for of in by_key], path + step(first.kind, key), results) for key in first.keys
    ]
    return [close_node(first.kind, first.keys, [column[part] for column in columns]) for part in range(results)]


def _meets(rule: Rule, trees: Sequence[Any], nodes: Sequence[Node | None], path: str) -> bool:
    """Whether a rule acts here, rather than on what lies below."""
    if isinstance(rule, Replicated):
        return True
    if isinstance(rule, SplitList) and all(type(tree) in (list, tuple) for tree in trees):
        return True
    for tree, node in zip(trees, nodes, strict=True):
        if node is not None:
            continue
        if isinstance(rule, SplitList):
            raise ValueError(f"{path}: {describe(tree, node)} is no list; use Split or Replicated for it")  # noqa: TRY004
        if not isinstance(tree, Tensor):
            what = f"{path}: {describe(tree, node)} has no dimension to split"
            raise ValueError(f"{what}; use Replicated for it, or SplitList for the list that it is in")  # noqa: TRY004
        if not -tree.ndim <= rule.dim < tree.ndim:
            raise ValueError(f"{path}: a tensor of shape {tuple(tree.shape)} has no dimension {rule.dim}")
    return all(node is None for node in nodes)


def _opened(tree: Any) -> Node:
    node = open_node(tree)
    assert node is not None
    return node
