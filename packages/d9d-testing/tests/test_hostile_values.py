"""Strategies for JSON values: the types of a schema, and edits of a value."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_testing.hostile import values as values_module
from d9d_testing.hostile.templates import ATTACKS
from d9d_testing.hostile.values import edited, edited_job, hostile_values, schema_values
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

QUICK = settings(
    max_examples=3000, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
FEW = settings(max_examples=30, database=None, derandomize=True)


def depth(value: Any) -> int:
    levels = 0
    while isinstance(value, list) and value:
        value, levels = value[0], levels + 1
    return levels


@pytest.mark.thorough
def test_hostile_values_are_deep_long_and_of_every_type() -> None:
    assert 200 <= depth(find(hostile_values(), lambda value: depth(value) >= 200, settings=QUICK)) <= 250
    for kind in (bool, int, float, str, dict, list, type(None)):
        find(hostile_values(), lambda value, kind=kind: type(value) is kind, settings=QUICK)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["kind", "sizes"],
    "properties": {
        "kind": {"const": "a"},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/Size"}},
        "mode": {"enum": ["x", "y"]},
        "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "$defs": {"Size": {"oneOf": [{"type": "integer"}, {"type": "string"}]}},
}


@FEW
@given(schema_values(SCHEMA))
def test_values_of_a_schema_have_its_types(value: Any) -> None:
    assert {"kind", "sizes"} <= value.keys() <= SCHEMA["properties"].keys()
    assert value["kind"] == "a"
    assert len(value["sizes"]) <= 3
    assert all(type(size) in (int, str) for size in value["sizes"])
    assert value.get("mode", "x") in ("x", "y")
    assert value.get("on") in (True, False, None)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "null"}, {type(None)}),
        ({"type": "boolean"}, {bool}),
        ({"type": "integer"}, {int}),
        ({"type": "number"}, {int, float}),
        ({"type": "string"}, {str}),
    ],
)
def test_simple_types_are_respected(schema: dict[str, Any], types: set[type]) -> None:
    @FEW
    @given(schema_values(schema))
    def each(value: Any) -> None:
        assert type(value) in types

    each()
    find(schema_values({}), lambda value: isinstance(value, dict), settings=QUICK)  # any type: hostile values


@pytest.mark.parametrize(("optional", "most"), [(7, 7), (8, 3)])
def test_an_object_with_many_optional_fields_has_few_of_them(optional: int, most: int) -> None:
    fields = {name: {"const": 0} for name in ("needed", *(f"f{number}" for number in range(optional)))}
    values = schema_values({"properties": fields, "required": ["needed", "unknown"]})
    found: list[int] = []

    @settings(max_examples=80, database=None, derandomize=True)
    @given(values)
    def each(value: Any) -> None:
        assert "needed" in value
        found.append(len(value) - 1)

    each()
    assert (min(found), max(found)) == (0, most)


@pytest.mark.thorough
def test_edits_remove_add_replace_and_swap_and_leave_the_given_value() -> None:
    given_value = {"a": 1, "b": [2]}
    for wanted in (
        {"a": 1},  # removed
        {"a": 1, "b": []},  # removed inside
        {"a": [2], "b": 1},  # swapped
        {"a": 2, "b": [1]},  # swapped with an inner value
        {"a": None, "b": [2]},  # replaced by a hostile value
        {"a": 1, "b": [None]},  # replaced inside
    ):
        assert find(edited(given_value, 1), lambda value, wanted=wanted: value == wanted, settings=QUICK) == wanted
    find(edited(given_value, 1), lambda value: isinstance(value, dict) and len(value) == 3, settings=QUICK)  # added
    longer = edited(given_value, 1).filter(lambda value: isinstance(value, dict) and isinstance(value.get("b"), list))
    find(longer, lambda value: value["b"][:1] == [2] and len(value["b"]) == 2, settings=QUICK)
    find(edited(given_value, 1), lambda value: not isinstance(value, dict), settings=QUICK)  # replaced as a whole
    assert given_value == {"a": 1, "b": [2]}
    assert find(edited({"a": 1, "b": 2}, 2), lambda value: value == {}, settings=QUICK) == {}


def test_attacks_differ_and_texts_to_indent_have_lines() -> None:
    assert len(set(ATTACKS.values())) == len(ATTACKS)
    indented = [template for name, template in ATTACKS.items() if name.startswith("indent")]
    assert len(indented) == 2
    assert all(template.startswith("{% set long = 'a\\n' * 5592405 %}") for template in indented)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("integer", [0, 1, 2, 3, 4, 8, 16, 1000, 2**31, 2**40]), ("number", [0, 1e-3, 0.1, 0.5, 1, 10, 1e9]),
        ("string", ["", "a", "eval/loss", "cpu", "cuda", "bytes", "/nowhere"]),
    ],
)  # fmt: skip
def test_values_at_limits_are_drawn_often(kind: str, values: list[Any]) -> None:
    strategy: Any = schema_values({"type": kind})
    assert list(strategy.original_strategies[0].elements) == values


def test_a_job_has_at_most_one_edit_outside_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(values_module, "edited", lambda _job, edits: asked.append(edits) or st.just(7))  # type: ignore[func-returns-value]
    schema = {"properties": {"a": {"type": "object", "properties": {"c": {"type": "integer"}}}}}
    found: list[Any] = []

    @FEW
    @given(edited_job({"a": {"b": "kept"}}, schema))
    def draw_jobs(job: Any) -> None:
        found.append(job)

    draw_jobs()
    assert set(asked) == {1}
    assert {"job": 7} in found
    others = [job for job in found if job != {"job": 7}]
    assert others
    assert all(job["a"]["b"] == "kept" and len(job) == 1 for job in others)
