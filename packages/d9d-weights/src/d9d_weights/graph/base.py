"""Base class and compositions of mappers, which turn named values into other named values without reading tensors."""

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

#: Largest number of problems that an error lists; a wrong prefix causes thousands.
SHOWN = 20
#: Largest number of problems that suggest a similar name; a search among 10,000 names takes half a second.
_HINTS = 3


class Scope:
    """Input of a mapper: the values that the mapper may take, by name, and a list to which it adds problems.

    Args:
        values: values in order.
        problems: problems found so far; shared by all scopes of one graph.
        path: prefix of names in messages.
        hints: whether messages about missing names suggest similar names.
    """

    def __init__(self, values: Mapping[str, Value], problems: list[str], path: str = "", hints: bool = True) -> None:
        self.values = values
        self.problems = problems
        self.path = path
        self.hints = hints

    def over(self, values: Mapping[str, Value], prefix: str = "") -> Scope:
        """New scope for other values, with the same list of problems and a longer path."""
        return Scope(values, self.problems, self.path + prefix, self.hints)

    def find(self, names: Sequence[str], mapper: str) -> list[Value] | None:
        """Values with these names; if one is missing, add a problem and return ``None``."""
        missing = [name for name in names if name not in self.values]
        for name in missing:
            wanted = self.hints and len(self.problems) < _HINTS
            near = difflib.get_close_matches(name, self.values, n=1) if wanted else []
            hint = f"; did it mean '{self.path}{near[0]}'?" if near else ""
            self.problems.append(f"{mapper} needs '{self.path}{name}', which does not exist{hint}")
        return None if missing else [self.values[name] for name in names]

    def complain(self, text: str) -> None:
        """Add a problem: one line of the error message."""
        self.problems.append(text)

    def are_targets(self, names: Sequence[str], mapper: str) -> bool:
        """Whether a mapper has at least one result and no duplicate results; add problems otherwise."""
        if not names:
            self.complain(f"{mapper} has no results: give their names")
        twice = {name: None for name in names if names.count(name) > 1} if len(set(names)) < len(names) else {}
        for name in twice:
            self.complain(f"{mapper} has the result '{self.path}{name}' twice")
        return bool(names) and not twice

    def below(self, prefix: str) -> dict[str, Value]:
        """Values whose names start with ``prefix``, which is removed from the names."""
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
    """Tensor that is left out because another tensor has the same values.

    Both tensors are compared before weights are loaded.

    Attributes:
        name: name of the left-out tensor.
        copy: value of the left-out tensor.
        original: value of the kept tensor.
        otherwise: error text if the values differ, with the consequence and the next action.
    """

    name: str
    copy: Value
    original: Value
    otherwise: str


@dataclass
class Effect:
    """Effect of a mapper on values.

    Attributes:
        taken: names of the taken values, each with the name of the mapper that took it, for messages.
        made: results in order, by name.
        fresh: names of results that keep their initial values, each with the name of the mapper that declared it.
        duplicates: taken tensors that are copies of other tensors.
    """

    taken: dict[str, str] = field(default_factory=dict)
    made: dict[str, Value] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)


class Mapper(ABC):
    """Base of mappers, which describe how named tensors become other named tensors.

    A mapper is immutable, and independent of files, ranks and models.
    """

    @abstractmethod
    def apply(self, scope: Scope) -> Effect:
        """Take values of the scope and return results. Problems are added to ``scope.problems``."""

    @abstractmethod
    def inverse(self) -> Mapper:
        """Inverse of this mapper.

        Raises:
            CheckpointError: there is no inverse, because information is lost.
        """

    def rest(self) -> bool:
        """Whether this mapper takes all values that the other mappers of a :class:`Parallel` do not take."""
        return False

    def __rshift__(self, other: Mapper) -> Mapper:
        """Compose ``first >> second``, which applies the second mapper to the results of the first."""
        return Sequential(self, other)


class Parallel(Mapper):
    """Parallel composition of mappers, each of which takes other tensors; no tensor may be taken or made twice.

    Args:
        mappers: mappers in any order; results are ordered like the mappers.
    """

    def __init__(self, *mappers: Mapper) -> None:
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        together = Effect()
        greedy = [mapper for mapper in self.mappers if mapper.rest()]
        effects = {id(mapper): mapper.apply(scope) for mapper in self.mappers if not mapper.rest()}
        if greedy:  # this mapper takes all values that the other mappers leave
            if len(greedy) > 1:
                scope.complain("two parallel mappers take all remaining tensors; only one may")
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
    """Sequential composition of mappers; tensors that a mapper does not take are passed on to the next mappers.

    Args:
        mappers: mappers in order of application.
    """

    def __init__(self, *mappers: Mapper) -> None:
        self.mappers = mappers

    def apply(self, scope: Scope) -> Effect:
        combined = Effect()
        waiting = dict(scope.values)  # sources that no mapper has taken yet
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
    """Yield the distinct problems, at most :data:`SHOWN` of them, then a line with the number left out."""
    distinct = list(dict.fromkeys(problems))
    yield from distinct[:SHOWN]
    if len(distinct) > SHOWN:
        yield f"... and {len(distinct) - SHOWN} more"


def raise_if(problems: Sequence[str], what: str) -> None:
    """Raise one error with all problems, if there are any.

    Raises:
        CheckpointError: there are problems.
    """
    if problems:
        raise CheckpointError("\n".join([what, *(f"  {line}" for line in lines(problems))]))


def _add(together: Effect, effect: Effect, scope: Scope) -> None:
    for name, mapper in effect.taken.items():
        if name in together.taken:
            scope.complain(f"'{scope.path}{name}' is taken twice, by {together.taken[name]} and {mapper}; use Share")
    check_new(effect.made, together.made, scope, "a parallel mapper")
    together.taken |= effect.taken
    together.made |= effect.made
    together.fresh |= effect.fresh
    together.duplicates += effect.duplicates


def check_new(made: Mapping[str, Value], before: Mapping[str, Value], scope: Scope, who: str) -> None:
    """Add a problem for each result name that another mapper has already made."""
    for name in made:
        if name in before:
            scope.complain(f"'{scope.path}{name}' is made twice, first by {who}")
