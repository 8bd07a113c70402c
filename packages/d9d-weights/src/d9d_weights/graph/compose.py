"""Mappers that change the scope of other mappers: by a prefix, by their order, or to the share of one worker."""

from __future__ import annotations

from d9d_core.errors import CheckpointError

from d9d_weights.graph.base import Effect, Mapper, Scope, check_new
from d9d_weights.graph.expressions import Value
from d9d_weights.graph.groups import group_values

__all__ = ["Connect", "Prefix", "Shard"]


class Prefix(Mapper):
    """Apply a mapper to the tensors below a prefix: ``Prefix("model.layers.0.", "layers.0.", layer)``.

    Args:
        source: prefix of the tensors' names, with the dot.
        target: prefix of the results' names.
        mapper: inner mapper, which sees names without the prefix.
    """

    def __init__(self, source: str, target: str, mapper: Mapper) -> None:
        self.source = source
        self.target = target
        self.mapper = mapper

    def apply(self, scope: Scope) -> Effect:
        inner = self.mapper.apply(scope.over(scope.below(self.source), self.source))
        return Effect(
            {self.source + name: mapper for name, mapper in inner.taken.items()},
            {self.target + name: value for name, value in inner.made.items()},
            {self.target + name: mapper for name, mapper in inner.fresh.items()},
            inner.duplicates,
        )

    def inverse(self) -> Mapper:
        return Prefix(self.target, self.source, self.mapper.inverse())


class Connect(Mapper):
    """Composition of mappers in the order that follows from names: a mapper may take results of other mappers.

    Args:
        mappers: mappers whose inputs and outputs do not depend on other tensors of the scope.
    """

    def __init__(self, *mappers: Mapper) -> None:
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        there, made = dict(scope.values), dict[str, Value]()
        combined, left = Effect(), list(self.mappers)
        while left:
            later = []
            for mapper in left:
                attempt: list[str] = []
                effect = mapper.apply(Scope(there, attempt, scope.path, hints=False))
                if attempt:
                    later.append((mapper, attempt))
                    continue
                for name in effect.taken:
                    del there[name]
                    if made.pop(name, None) is None:
                        combined.taken[name] = effect.taken[name]
                check_new(effect.made, there, scope, "another mapper")
                made |= effect.made
                there |= effect.made
                combined.fresh |= effect.fresh
                combined.duplicates += effect.duplicates
            if len(later) == len(left):
                reasons = [reason for _, attempt in later for reason in attempt]
                scope.complain(
                    "no mapper can be applied first, because of a cycle or a missing tensor: " + "; ".join(reasons)
                )
                break
            left = [mapper for mapper, _ in later]
        combined.made = made
        return combined

    def inverse(self) -> Mapper:
        return Connect(*(mapper.inverse() for mapper in self.mappers))


class Shard(Mapper):
    """Restrict a mapper to one worker's share: complete groups of outputs with about equally many bytes per worker.

    Args:
        mapper: mapper of all outputs.
        index: index of the worker, from 0.
        count: number of workers.
    """

    def __init__(self, mapper: Mapper, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise CheckpointError(f"Shard: there is no worker {index} of {count}; give an index from 0 to {count - 1}")
        self.mapper = mapper
        self.index = index
        self.count = count

    def apply(self, scope: Scope) -> Effect:
        effect = self.mapper.apply(scope)
        loads = [0] * self.count
        mine: set[str] = set()
        groups = group_values(effect.made)
        for group in sorted(groups, key=lambda group: (-group.bytes, group.outputs[0])):
            worker = min(range(self.count), key=lambda worker: (loads[worker], worker))
            loads[worker] += group.bytes
            if worker == self.index:
                mine |= set(group.outputs)
        fresh = effect.fresh if self.index == 0 else {}
        made = {name: value for name, value in effect.made.items() if name in mine}
        return Effect(effect.taken, made, fresh, effect.duplicates if self.index == 0 else [])

    def inverse(self) -> Mapper:
        raise CheckpointError("Shard has no inverse; invert the mapper inside of it, then apply Shard to the inverse")

    def rest(self) -> bool:
        return self.mapper.rest()
