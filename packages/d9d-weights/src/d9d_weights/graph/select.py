"""Mappers that select, drop and share tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from d9d_core.errors import CheckpointError

from d9d_weights.graph.base import Duplicate, Effect, Mapper, Parallel, Scope
from d9d_weights.graph.mappers import Identity, Pattern, Rename

__all__ = ["Copy", "Drop", "Either", "Explained", "Fresh", "Rest", "Select", "Share"]


@dataclass(frozen=True)
class Share(Mapper):
    """Mapper from one tensor to several names, such as an embedding that is also the head.

    Attributes:
        name: name of the tensor.
        targets: new names; the inverse keeps the first.
    """

    name: str
    targets: tuple[str, ...]

    def apply(self, scope: Scope) -> Effect:
        label = f"Share('{self.name}')"
        values = scope.find([self.name], label) or []
        scope.are_targets(self.targets, label)
        return Effect({self.name: label}, {target: value for value in values for target in self.targets})

    def inverse(self) -> Mapper:
        return Parallel(Rename(self.targets[0], self.name), *(Drop(other) for other in self.targets[1:]))


@dataclass(frozen=True)
class Select(Mapper):
    """Mapper that moves the tensors of a module to another name and drops all others: ``Select("model", "backbone")``.

    Attributes:
        module: name of the module, ``""`` for the model itself.
        to: new name of the module.
    """

    module: str
    to: str = ""

    def apply(self, scope: Scope) -> Effect:
        old, new = (f"{module}." if module else "" for module in (self.module, self.to))
        label = f"Select('{self.module}')"
        below = scope.below(old)
        if not below:
            scope.complain(f"{label} finds no tensors below '{scope.path}{old}'")
        return Effect(dict.fromkeys(scope.values, label), {new + name: value for name, value in below.items()})

    def inverse(self) -> Mapper:
        return Select(self.to, self.module)


@dataclass(frozen=True)
class Drop(Mapper):
    """Mapper that leaves out tensors, such as a head that the model lacks. Its inverse does nothing.

    :attr:`~d9d_weights.graph.graph.StateGraph.left_out` lists them for the user. Use :class:`Copy` for a tensor that
    duplicates another tensor.

    Attributes:
        name: name of the tensor, or a pattern.
        optional: whether the tensor may be absent.
    """

    name: str
    optional: bool = False

    def apply(self, scope: Scope) -> Effect:
        label = f"Drop('{self.name}')"
        pattern = Pattern(self.name)
        if not pattern.placeholders:
            absent = self.optional and self.name not in scope.values
            taken = [self.name] if not absent and scope.find([self.name], label) else []
        else:
            taken = [name for name in scope.values if pattern.match(name) is not None]
            if not taken and not self.optional:
                scope.complain(f"{label} matches no name" + (f" that starts with '{scope.path}'" if scope.path else ""))
        return Effect(dict.fromkeys(taken, label))

    def inverse(self) -> Mapper:
        return _Nothing()


@dataclass(frozen=True)
class Rest(Mapper):
    """Mapper that takes all tensors that other mappers do not take: keeps them, except for ignored tensors.

    Attributes:
        known: names of tensors that are kept even if ``ignored`` matches them.
        ignored: regular expressions; a tensor is left out if one of them is found in its name.
    """

    known: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    def apply(self, scope: Scope) -> Effect:
        kept = {name: value for name, value in scope.values.items() if not self._is_ignored(name)}
        return Effect(dict.fromkeys(scope.values, "Rest"), kept)

    def inverse(self) -> Mapper:
        return Identity()

    def rest(self) -> bool:
        return True

    def _is_ignored(self, name: str) -> bool:
        return name not in self.known and any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Copy(Mapper):
    """Mapper that leaves out a tensor that duplicates another tensor, such as the head of a tied model.

    An absent tensor is no error. Readers of files compare the two tensors with
    :func:`~d9d_weights.hugging_face.load.check_duplicates`.

    Attributes:
        name: name of the duplicate.
        original: name of the other tensor, which this mapper does not take.
        otherwise: error text if the values differ, with the consequence and the next action.
    """

    name: str
    original: str
    otherwise: str

    def apply(self, scope: Scope) -> Effect:
        label = f"Copy('{self.name}')"
        if self.name not in scope.values:
            return Effect()
        taken = {self.name: label}
        found = scope.find([self.name, self.original], label)
        if found is None:
            return Effect(taken)
        copy, original = found
        return Effect(taken, duplicates=[Duplicate(scope.path + self.name, copy, original, self.otherwise)])

    def inverse(self) -> Mapper:
        return _Nothing()


@dataclass(frozen=True)
class Explained(Mapper):
    """Mapper whose problems are replaced by another text, for example one that names files and fields.

    Attributes:
        mapper: mapper that may fail.
        text: error text, with the next action.
    """

    mapper: Mapper
    text: str

    def apply(self, scope: Scope) -> Effect:
        problems: list[str] = []
        effect = self.mapper.apply(Scope(scope.values, problems, scope.path, hints=False))
        if problems:
            scope.complain(self.text)
        return effect

    def inverse(self) -> Mapper:
        return self.mapper.inverse()

    def rest(self) -> bool:
        return self.mapper.rest()


@dataclass(frozen=True)
class Fresh(Mapper):
    """Declare names that the checkpoint lacks on purpose, such as a new head: they keep their initial values.

    Attributes:
        names: names of the tensors.
    """

    names: tuple[str, ...]

    def apply(self, scope: Scope) -> Effect:  # noqa: ARG002 - takes nothing
        return Effect(fresh=dict.fromkeys(self.names, "Fresh"))

    def inverse(self) -> Mapper:
        return Parallel(*(Drop(name) for name in self.names))


class Either(Mapper):
    """Mapper that applies the first of several mappers that finds all its tensors, for checkpoints in several layouts.

    If no mapper finds all its tensors, the problems of the mapper that finds most tensors are reported. The tensors of
    the other mappers are not taken, so a checkpoint with two layouts at once is refused. A mapper whose tensors are all
    optional always matches: give it last.

    Args:
        mappers: mappers in order of preference; the inverse is the inverse of the first mapper.
    """

    def __init__(self, *mappers: Mapper) -> None:
        if not mappers:
            raise CheckpointError("Either needs at least one mapper")
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        nearest, most = self.mappers[0], 0
        for mapper in self.mappers:
            attempt: list[str] = []
            effect = mapper.apply(Scope(scope.values, attempt, scope.path, hints=False))
            if not attempt:
                return effect
            found = len(effect.taken.keys() & scope.values.keys())
            if found > most:
                nearest, most = mapper, found
        return nearest.apply(scope)

    def inverse(self) -> Mapper:
        return self.mappers[0].inverse()

    def rest(self) -> bool:
        return any(mapper.rest() for mapper in self.mappers)


class _Nothing(Mapper):
    def apply(self, scope: Scope) -> Effect:  # noqa: ARG002 - takes nothing
        return Effect()

    def inverse(self) -> Mapper:
        return self
