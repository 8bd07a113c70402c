"""Fields of a config, as ``d9d plugins show`` and the page of fields give them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from d9d_core.config import PluginConfig, Section
from d9d_core.job_file.fields import fields_of, kind_of
from d9d_core.job_file.open_union import Named
from pydantic import Field, PositiveInt


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Round(Section):
    kind: Literal["round"] = "round"
    """Selects the shape."""
    radius: Annotated[float, Field(gt=0, lt=9)]
    """Distance
    from the centre."""


class Square(Section):
    kind: Literal["square"] = "square"
    side: float = float("inf")


class Group(Section):
    match: str


class Shapes(PluginConfig):
    name: Literal["shapes"] = "shapes"
    shapes: dict[str, Round | Square] = {"a": Square()}
    groups: list[Group] = []
    one: Group | None = None


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (PositiveInt | None, "whole number > 0 or null"),
        (Annotated[float, Field(ge=0, lt=1)], "number >= 0, < 1"),
        (Literal["max-autotune", 2, None], "max-autotune or 2 or null"),
        (Color, "red or blue"),
        (tuple[str, ...], "list of text"),
        (tuple[float, float, float], "list of number"),
        (dict[str, list[int]], "map of list of whole number"),
        (Group, "mapping"),
        (Path, "path"),
        (Any, "any value"),
        (dict, "mapping"),
        (Annotated[PluginConfig, Named("lr schedule")] | None, "lr schedule or null"),
    ],
)
def test_a_type_is_given_in_words(annotation: Any, words: str) -> None:
    assert kind_of(annotation) == words


def test_nested_fields_are_named_as_a_job_file_writes_them() -> None:
    assert [tuple(field) for field in fields_of(Shapes)] == [
        ("shapes", "map of mapping", '{"a": {"kind": "square", "side": "inf"}}', ""),
        ("shapes.NAME.kind (kind: round)", "round", "round", "Selects the shape."),
        ("shapes.NAME.radius (kind: round)", "number > 0, < 9", None, "Distance from the centre."),
        ("shapes.NAME.kind (kind: square)", "square", "square", ""),
        ("shapes.NAME.side (kind: square)", "number", '"inf"', ""),
        ("groups", "list of mapping", "[]", ""),
        ("groups[].match", "text", None, ""),
        ("one", "mapping or null", "null", ""),
        ("one.match", "text", None, ""),
    ]
