"""Mappers turn named values into other named values, without reading anything: base class and composition."""

from __future__ import annotations

import bisect
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from d9d_core.errors import CheckpointError

from d9d_weights.graph.expressions import Value

__all__ = ["Mapper", "Parallel", "Sequential"]

#: An error lists this many problems; a wrong prefix makes thousands.
SHOWN = 20
#: So many of them come with a similar name; looking for one costs half a second among 10,000 names.
_HINTS = 3


class Scope:
    """Base of every application of a mapper: the scope of values that it may take, by name, and the list of problems.

    Args:
        values: in the order in which they come.
        problems: what is wrong so far; shared by all scopes of one graph.
        path: put before names in messages.
        hints: whether complaints about absent names are to guess what was meant.
    """

    def __init__(self, values: Mapping[str, Value], problems: list[str], path: str = "", hints: bool = True) -> None:
        self.values = values
        self.problems = problems
        self.path = path
        self.hints = hints

    def over(self, values: Mapping[str, Value], prefix: str = "") -> Scope:
        """Scope of other values, whose names lack ``prefix``, with the same list of problems."""
        return Scope(values, self.problems, self.path + prefix, self.hints)

    def find(self, names: Sequence[str], mapper: str) -> list[Value] | None:
        """Values of these names; if one is missing, a problem and nothing."""
        missing = [name for name in names if name not in self.values]
        for name in missing:
            wanted = self.hints and len(self.problems) < _HINTS
            near = difflib.get_close_matches(name, self.values, n=1) if wanted else []
            hint = f"; did it mean '{self.path}{near[0]}'?" if near else ""
            self.problems.append(f"{mapper} needs '{self.path}{name}', which is not there{hint}")
        return None if missing else [self.values[name] for name in names]

    def complain(self, text: str) -> None:
        """Add a problem."""
        self.problems.append(text)

    def are_targets(self, names: Sequence[str], mapper: str) -> bool:
        """Whether a mapper makes something, and nothing twice; else a problem."""
        if not names:
            self.complain(f"{mapper} makes nothing: give the names of its results")
        twice = {name: None for name in names if names.count(name) > 1} if len(set(names)) < len(names) else {}
        for name in twice:
            self.complain(f"{mapper} makes '{self.path}{name}' twice")
        return bool(names) and not twice

    def below(self, prefix: str) -> dict[str, Value]:
        """Values whose names start with ``prefix``, by the rest of the name."""
        if not prefix:
            return dict(self.values)
        first = bisect.bisect_left(self._sorted, prefix)
        last = bisect.bisect_left(self._sorted, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        return {name.removeprefix(prefix): self.values[name] for name in self._sorted[first:last]}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.values)


@dataclass(frozen=True)
class Duplicate:
    """Tensor that is left out because another one holds the same numbers, which is compared before anything is loaded.

    Attributes:
        name: of the tensor that is left out.
        copy: its value.
        original: value of the tensor that is kept.
        otherwise: error if they differ; says what would be lost, and what to do.
    """

    name: str
    copy: Value
    original: Value
    otherwise: str


@dataclass
class Effect:
    """Effect of a mapper on values.

    Attributes:
        taken: name -> the mapper that took it.
        made: name -> value, in order.
        fresh: names that stay as they were initialised.
        duplicates: tensors that are taken because others hold the same numbers.
    """

    taken: dict[str, str] = field(default_factory=dict)
    made: dict[str, Value] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)


class Mapper(ABC):
    """Base of mappers: how named tensors become others. Frozen; knows nothing of files, ranks or models."""

    @abstractmethod
    def apply(self, scope: Scope) -> Effect:
        """Take values and make others. What is wrong goes to ``scope.problems``."""

    @abstractmethod
    def inverse(self) -> Mapper:
        """Inverse of this mapper.

        Raises:
            CheckpointError: something is lost, so that there is none.
        """

    def rest(self) -> bool:
        """Whether this mapper takes whatever its neighbours leave."""
        return False

    def __rshift__(self, other: Mapper) -> Mapper:
        """Sequence ``first >> second``: one after the other."""
        return Sequential(self, other)


class Parallel(Mapper):
    """Base composition of mappers, in parallel: each takes its own tensors: none may be taken twice, none made twice.

    Args:
        mappers: in any order; results come in this order.
    """

    def __init__(self, *mappers: Mapper) -> None:
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        together = Effect()
        greedy = [mapper for mapper in self.mappers if mapper.rest()]
        effects = {id(mapper): mapper.apply(scope) for mapper in self.mappers if not mapper.rest()}
        if greedy:  # what the others leave
            if len(greedy) > 1:
                scope.complain("two neighbours take the rest; one must do")
            taken = {name for effect in effects.values() for name in effect.taken}
            left = {name: value for name, value in scope.values.items() if name not in taken}
            effects[id(greedy[0])] = greedy[0].apply(scope.over(left))
        for mapper in self.mappers:
            if id(mapper) in effects:
                _add(together, effects[id(mapper)], scope)
        return together

    def inverse(self) -> Mapper:
        return Parallel(*(mapper.inverse() for mapper in self.mappers))

    def rest(self) -> bool:
        return any(mapper.rest() for mapper in self.mappers)


class Sequential(Mapper):
    """Base composition of mappers, in sequence: what one of them does not take passes it by.

    Args:
        mappers: in order of application.
    """

    def __init__(self, *mappers: Mapper) -> None:
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        combined = Effect()
        waiting = dict(scope.values)  # not taken yet
        made: dict[str, Value] = {}
        for mapper in self.mappers:
            effect = mapper.apply(scope.over({**waiting, **made}))
            for name in effect.taken:
                if name in made:
                    del made[name]
                elif name in waiting:
                    combined.taken[name] = effect.taken[name]
                    del waiting[name]
            check_new(effect.made, made, scope, "an earlier step")
            made |= effect.made
            combined.fresh |= effect.fresh
            combined.duplicates += effect.duplicates
        combined.made = made
        return combined

    def inverse(self) -> Mapper:
        return Sequential(*(mapper.inverse() for mapper in reversed(self.mappers)))

    def rest(self) -> bool:
        return bool(self.mappers) and self.mappers[0].rest()


def lines(problems: Sequence[str]) -> Iterator[str]:
    """Problems worth showing."""
    distinct = list(dict.fromkeys(problems))
    yield from distinct[:SHOWN]
    if len(distinct) > SHOWN:
        yield f"... and {len(distinct) - SHOWN} more"


def raise_if(problems: Sequence[str], what: str) -> None:
    """Report problems together.

    Raises:
        CheckpointError: there are some.
    """
    if problems:
        raise CheckpointError("\n".join([what, *(f"  {line}" for line in lines(problems))]))


def _add(together: Effect, effect: Effect, scope: Scope) -> None:
    for name, mapper in effect.taken.items():
        if name in together.taken:
            scope.complain(f"'{scope.path}{name}' is taken twice, by {together.taken[name]} and {mapper}; use Share")
    check_new(effect.made, together.made, scope, "a neighbour")
    together.taken |= effect.taken
    together.made |= effect.made
    together.fresh |= effect.fresh
    together.duplicates += effect.duplicates


def check_new(made: Mapping[str, Value], before: Mapping[str, Value], scope: Scope, who: str) -> None:
    """Add a problem for each name that was made before."""
    for name in made:
        if name in before:
            scope.complain(f"'{scope.path}{name}' is made twice, the first time by {who}")
