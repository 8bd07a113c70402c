"""Strategies for JSON values: hostile values, values of a JSON schema, and edits of a given value. Needs hypothesis."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

#: Values of every kind at every limit; each has broken some reader.
HOSTILE: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63),
    *(-(2**63), 10**18, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e30, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", " ", "0", "-1", "1e3", "null", "a", "é", "\u202e", "\0", "\x1b[2J", "\ud800", "x" * 300, "y" * 5000),
    *("..", "../outside", "/dev/zero", "/etc/passwd", "~", "*", "[", "{}", "%s", "file:///dev/zero", "zip://a", "://"),
    *([], {}, [[]], [None], {"": None}, {"name": 1}, {"name": "adamw"}, [1] * 1000, [[[[[[[[1]]]]]]]]),
)


def hostile_values() -> st.SearchStrategy[Any]:
    """Strategy for values that few fields expect, such as very large numbers, odd texts and deeply nested lists."""
    nested = st.integers(20, 250).map(_nested)
    # Values are copied, because edits change nested values.
    return st.one_of(
        st.sampled_from(HOSTILE).map(copy.deepcopy), st.integers(), st.floats(), st.text(max_size=20), nested
    )


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def schema_values(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Values of the types that a JSON schema allows; other constraints are ignored.

    Args:
        schema: schema of the value.
        root: schema with the ``$defs`` that references name; by default ``schema``.
    """
    root = schema if root is None else root
    if "$ref" in schema:
        return st.deferred(lambda: schema_values(root["$defs"][schema["$ref"].rpartition("/")[2]], root))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of(*(schema_values(option, root) for option in schema[key]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]]).map(copy.deepcopy)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        "null": st.none(),
        "boolean": st.booleans(),
        "integer": st.sampled_from([0, 1, 2, 3, 4, 8, 16, 1000, 2**31, 2**40]) | st.integers(-10, 10**6),
        "number": st.sampled_from([0, 1e-3, 0.1, 0.5, 1, 10, 1e9]) | st.floats(),
        "string": st.sampled_from(["", "a", "eval/loss", "cpu", "cuda", "bytes", "/nowhere"]) | st.text(max_size=10),
    }
    kind = schema.get("type")
    if kind == "array":
        return st.lists(schema_values(schema.get("items", {}), root), max_size=3)
    if kind == "object" or "properties" in schema:
        fields = schema.get("properties", {})
        needed = {name: schema_values(fields[name], root) for name in schema.get("required", ()) if name in fields}
        others = {name: schema_values(field, root) for name, field in fields.items() if name not in needed}
        return st.fixed_dictionaries(needed, optional=others) if len(others) < 8 else _some(needed, others)
    return simple.get(kind, hostile_values())


@st.composite
def _some(
    draw: st.DrawFn, needed: dict[str, st.SearchStrategy[Any]], others: dict[str, st.SearchStrategy[Any]]
) -> dict[str, Any]:
    """Object with few of its many optional fields, because an object with all of them is rarely valid."""
    chosen = draw(st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True))
    return {name: draw(value) for name, value in {**needed, **{name: others[name] for name in chosen}}.items()}


@st.composite
def edited(draw: st.DrawFn, value: Any, edits: int = 2) -> Any:
    """Copy of a JSON value with one to ``edits`` edits anywhere: values are replaced, removed, added or swapped."""
    result = [copy.deepcopy(value)]  # in a list, so that the value itself can be replaced
    for _ in range(draw(st.integers(1, edits))):
        target, key = draw(st.sampled_from(list(_places(result))))
        action = draw(st.sampled_from(["replace", "replace", "remove", "add", "swap"]))
        other, other_key = draw(st.sampled_from(list(_places(result))))
        if action == "remove" and target is not result:
            del target[key]
        elif action == "add" and isinstance(target[key], dict):
            target[key][draw(st.sampled_from(["name", "x", "", "\ud800", "__class__"]))] = draw(hostile_values())
        elif action == "add" and isinstance(target[key], list):
            target[key].append(draw(hostile_values()))
        elif action == "swap" and not isinstance(other[other_key], dict | list):
            target[key], other[other_key] = other[other_key], copy.deepcopy(target[key])
        else:
            target[key] = draw(hostile_values())
    return result[0]


def _places(value: Any) -> Any:
    """Container and key of every value that is nested in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


@st.composite
def edited_job(draw: st.DrawFn, job: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a job with some sections drawn from the schema, and possibly one edit that ignores the schema."""
    values = copy.deepcopy(dict(job))
    for section in draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=3, unique=True)):
        fresh = draw(schema_values(schema["properties"][section], schema))
        old = values.get(section)
        # Keep required fields of a section in most cases.
        values[section] = {**old, **fresh} if isinstance(old, dict) and isinstance(fresh, dict) else fresh
    if draw(st.booleans()):
        changed = draw(edited(values, edits=1))
        return changed if isinstance(changed, dict) else {"job": changed}
    return values
