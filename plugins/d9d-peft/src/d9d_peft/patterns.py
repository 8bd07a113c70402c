"""Patterns that choose modules and parameters by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from d9d_core.errors import BuildError

#: Number of names listed in an error message.
_SHOWN = 6


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a whole name, or its last part if the pattern has no dot."""
    return fnmatchcase(name, pattern) or ("." not in pattern and fnmatchcase(name.rpartition(".")[2], pattern))


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """First pattern that matches a name; ``None`` if none does."""
    return next((pattern for pattern in patterns if matches(name, pattern)), None)


def owners(name: str) -> list[str]:
    """Names of the modules that contain a module or parameter, the outermost module first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def select(names: Collection[str], patterns: Collection[str], where: str, what: str) -> list[str]:
    """Names that match some pattern, in their order.

    Args:
        names: names to choose from.
        patterns: patterns, see :func:`matches`.
        where: field of the job file, for error messages.
        what: kind of the named objects, in the plural, for error messages.

    Raises:
        BuildError: a pattern matches no name; the message suggests similar names.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise BuildError(f"{where}: no {what} match '{pattern}'; {_nearest(pattern, names)}")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def _nearest(pattern: str, names: Collection[str]) -> str:
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    near = get_close_matches(pattern, list(dict.fromkeys([*last, *names])), n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(repr(name) for name in near)}?"
    shown = ", ".join(last[:_SHOWN]) + (", ..." if len(last) > _SHOWN else "")
    return f"there are: {shown or 'none'}"
