"""Groups of a state graph's outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from d9d_weights.graph.expressions import Value

__all__ = ["Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """Outputs that share sources, directly or through other outputs; they are read, computed and freed together.

    Attributes:
        inputs: names of the sources, in the order in which the outputs need them.
        outputs: names of the outputs, in order.
        bytes: bytes of all outputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int


def group_values(values: Mapping[str, Value]) -> list[Group]:
    """Group a graph's outputs that share sources.

    The groups are in the order of their first outputs, which does not depend on hashes. The time is linear in the
    number of names.
    """
    parent: dict[str, str] = {}  # union-find forest of sources

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    sources = {name: value.sources() for name, value in values.items()}
    for found in sources.values():
        for name in found:
            parent.setdefault(name, name)
        for name in found[1:]:
            parent[root(name)] = root(found[0])
    inputs: dict[str, dict[str, None]] = {}
    outputs: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, value in values.items():
        key = root(sources[name][0]) if sources[name] else f"without sources: {name}"
        inputs.setdefault(key, {}).update(dict.fromkeys(sources[name]))
        outputs.setdefault(key, []).append(name)
        sizes[key] = sizes.get(key, 0) + math.prod(value.spec.shape) * value.spec.dtype.itemsize
    return [Group(tuple(inputs[key]), tuple(outputs[key]), sizes[key]) for key in outputs]
