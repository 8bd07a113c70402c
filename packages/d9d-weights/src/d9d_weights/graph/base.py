"""What all mappers share: they turn named values into other named values, without reading anything."""

from __future__ import annotations

import bisect
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from d9d_core.errors import CheckpointError

from d9d_weights.graph.expressions import Value

#: An error lists this many problems; a wrong prefix makes thousands.
SHOWN = 20
#: So many of them come with a similar name; looking for one costs half a second among 10,000 names.
_HINTS = 3


class Scope:
    """The values a mapper may take, by name, and a place for complaints.

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
        """The same place for complaints about other values, whose names lack ``prefix``."""
        return Scope(values, self.problems, self.path + prefix, self.hints)

    def find(self, names: Sequence[str], leaf: str) -> list[Value] | None:
        """The values of these names; without one of them, a complaint and nothing."""
        missing = [name for name in names if name not in self.values]
        for name in missing:
            wanted = self.hints and len(self.problems) < _HINTS
            near = difflib.get_close_matches(name, self.values, n=1) if wanted else []
            hint = f"; did it mean '{self.path}{near[0]}'?" if near else ""
            self.problems.append(f"{leaf} needs '{self.path}{name}', which is not there{hint}")
        return None if missing else [self.values[name] for name in names]

    def complain(self, text: str) -> None:
        """Something is wrong."""
        self.problems.append(text)

    def are_targets(self, names: Sequence[str], leaf: str) -> bool:
        """Whether a leaf makes something, and nothing twice; else a complaint."""
        if not names:
            self.complain(f"{leaf} makes nothing: give the names of its results")
        twice = {name: None for name in names if names.count(name) > 1} if len(set(names)) < len(names) else {}
        for name in twice:
            self.complain(f"{leaf} makes '{self.path}{name}' twice")
        return bool(names) and not twice

    def below(self, prefix: str) -> dict[str, Value]:
        """The values whose names start with ``prefix``, without it."""
        if not prefix:
            return dict(self.values)
        first = bisect.bisect_left(self._sorted, prefix)
        last = bisect.bisect_left(self._sorted, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        return {name.removeprefix(prefix): self.values[name] for name in self._sorted[first:last]}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.values)


@dataclass
class Effect:
    """What a mapper did.

    Attributes:
        taken: name -> the leaf that took it.
        made: name -> value, in order.
        fresh: names that stay as they were initialised.
    """

    taken: dict[str, str] = field(default_factory=dict)
    made: dict[str, Value] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)


class Mapper(ABC):
    """Describes how named tensors become other named tensors. Frozen; knows nothing of files, ranks or models."""

    @abstractmethod
    def apply(self, scope: Scope) -> Effect:
        """Take values and make others. What is wrong goes to ``scope.problems``."""

    @abstractmethod
    def inverse(self) -> Mapper:
        """The mapper that undoes this one.

        Raises:
            CheckpointError: something is lost, so that there is none.
        """

    def rest(self) -> bool:
        """Whether this takes whatever its neighbours leave."""
        return False

    def __rshift__(self, other: Mapper) -> Mapper:
        """``first >> second``: one after the other."""
        from d9d_weights.graph.compose import Sequential

        return Sequential(self, other)


def lines(problems: Sequence[str]) -> Iterator[str]:
    """The problems worth showing."""
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
