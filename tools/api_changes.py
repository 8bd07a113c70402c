"""Shapes of public names, and changes of shapes that break a plugin; used by ``tools/public_surface.py``.

A shape is a text: the kind of the object with the parameters of a call, then its public members, separated by ``; ``::

    function(rank, *, group=)
    class(modules, notes=); check(self, model); modules
    protocol; inputs(self, microbatch); losses(self, outputs, microbatch)

Types, default values and meanings are not compared: reviews have to see their changes.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

#: Protocols that only d9d implements, so that a new member breaks no plugin.
RECEIVED = {"DataRanks", "ForwardPass", "RunLog", "StageRunner", "Topology"}

Names = Mapping[str, Mapping[str, str]]
Deprecations = Mapping[str, Mapping[str, Mapping[str, Any]]]


def shape(value: Any) -> str:
    """Shape of a public object."""
    if inspect.isclass(value):
        return "; ".join([_kind(value) + _constructor(value), *sorted(_members(value))])
    return f"function{_signature(value)}" if inspect.isfunction(value) else "value"


def incompatible(before: Names, after: Names) -> Iterator[str]:
    """Sentences about changes that break a plugin, between two records: module -> name -> shape."""
    for module, names in before.items():
        for name, old in names.items():
            new = after.get(module, {}).get(name)
            problems = ["is gone"] if new is None else _changes(name, old, new)
            yield from (f"{module}.{name} {problem}" for problem in problems)


def unfit(before: Deprecations, after: Deprecations, release: str, newest: int) -> Iterator[str]:
    """Sentences about deprecations that end too early, or that no newer API goes with.

    Args:
        before: recorded module -> old name -> facts of its deprecation.
        after: current module -> old name -> facts of its deprecation.
        release: next release, in which a change made now appears.
        newest: newest plugin API.
    """
    major, minor = map(int, release.split("."))
    earliest = f"0.{minor + 2}" if major == 0 else f"{major + 1}.0"
    for module, names in after.items():
        for name, facts in names.items():
            if facts["last_api"] >= newest:
                yield f"{module}.{name} is deprecated after API {facts['last_api']}, but there is no API {newest + 1}"
            if name not in before.get(module, {}) and Version(facts["ends"]) < Version(earliest):
                yield f"{module}.{name} ends in release {facts['ends']}; the earliest is {earliest}"


def _kind(value: type) -> str:
    if getattr(value, "_is_protocol", False):
        return "protocol"
    return "config" if hasattr(value, "model_fields") else "class"


def _constructor(value: type) -> str:
    if _kind(value) == "config":
        fields: Mapping[str, Any] = value.model_fields  # type: ignore[attr-defined]
        words = [f"{name}{'' if field.is_required() else '='}" for name, field in sorted(fields.items())]
        return f"({', '.join(['*', *words])})" if words else "()"
    own = any("__init__" in vars(base) or "__new__" in vars(base) for base in _own_bases(value))
    if _kind(value) == "protocol" or issubclass(value, enum.Enum) or not own:
        return ""
    return _signature(value)


def _own_bases(value: type) -> list[type]:
    return [base for base in value.__mro__ if base.__module__.startswith("d9d_")]


def _members(value: type) -> set[str]:
    found: dict[str, str] = {}
    for base in reversed(_own_bases(value)):
        found |= dict.fromkeys(inspect.get_annotations(base), "")
        found |= {name: _call(member) for name, member in vars(base).items()}
    if dataclasses.is_dataclass(value):
        found |= {field.name: "" for field in dataclasses.fields(value)}
    fields = getattr(value, "model_fields", {})
    hidden = {"model_config", "model_post_init", *fields}
    public = {name for name in found if not name.startswith("_") or name == "__call__"}
    return {f"{name}{found[name]}" for name in public - hidden}


def _call(member: Any) -> str:
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return _signature(function) if inspect.isfunction(function) else ""


def _signature(function: Any) -> str:
    """Parameters of a function or class, without types and default values."""
    words, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.kind
        mark = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
        if kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or mark == "*" or kind is parameter.KEYWORD_ONLY
        words.append(f"{mark}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"({', '.join(words)})"


def _changes(name: str, old: str, new: str) -> Iterator[str]:
    (kind, call), *members = map(_split, old.split("; "))
    (new_kind, new_call), *new_members = map(_split, new.split("; "))
    if kind != new_kind:
        yield f"was a {kind} and is a {new_kind}"
        return
    if call is not None:
        yield from _narrower(call, new_call or "")
    known, now = dict(members), dict(new_members)
    implemented = kind == "protocol" and name not in RECEIVED
    for member, parameters in known.items():
        if member not in now:
            yield f"has no {member} any more"
        elif implemented and parameters != now[member]:
            yield f"has {member} with other parameters, ({now[member]}) instead of ({parameters})"
        elif parameters is not None:
            yield from (f"{text}, in {member}" for text in _narrower(parameters, now[member] or ""))
    if implemented:
        yield from (f"requires the new member {member}" for member in now if member not in known)


def _split(part: str) -> tuple[str, str | None]:
    """Name and parameters of ``name(parameters)``; ``None`` without parentheses."""
    found = re.fullmatch(r"(\w+)(?:\((.*)\))?", part)
    assert found is not None, part
    return found[1], found[2]


def _narrower(old: str, new: str) -> Iterator[str]:
    """Sentences about calls that worked with the old parameters and fail with the new ones."""
    (places, words), (new_places, new_words) = _parameters(old), _parameters(new)
    for number, name in enumerate(places):
        if name in new_words and new_places[number : number + 1] != [name]:
            yield f"does not take {name} as parameter {number + 1} any more"
    for name, optional in words.items():
        if name not in new_words:
            yield f"does not take {name} any more"
        elif optional and not new_words[name]:
            yield f"requires {name}"
    added = (name for name, optional in new_words.items() if not optional and name not in words)
    yield from (f"requires the new {name}" for name in added)


def _parameters(text: str) -> tuple[list[str], dict[str, bool]]:
    """Names of positional parameters, and for every parameter whether it is optional."""
    places: list[str] = []
    words: dict[str, bool] = {}
    keywords = False
    for word in filter(None, text.split(", ")):
        name = word.rstrip("=")
        keywords = keywords or word.startswith("*")
        if not keywords:
            places.append(name)
        if word != "*":
            words[name] = word.endswith("=") or word.startswith("*")
    return places, words
