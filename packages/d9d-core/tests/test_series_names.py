"""Names of series, made from anything, become names that every tracker can keep."""

from __future__ import annotations

import json
import os

import pytest
from d9d_core.tracker import LONGEST_NAME, SeriesName, split_tags, storable
from hypothesis import example, given
from hypothesis import strategies as st

ANYTHING = st.text(st.characters(), max_size=400) | st.sampled_from(["a", "b", ".", "/", "%", "\0", "é"]).flatmap(
    lambda letter: st.integers(0, 400).map(lambda count: letter * count)
)


@given(ANYTHING)
@example("half \ud800")
@example("step")
def test_a_name_can_be_kept_by_every_tracker(name: str) -> None:
    kept = storable(name)
    assert kept
    assert kept != "step"
    assert kept.isprintable()
    assert len(kept.encode()) <= LONGEST_NAME
    assert json.loads(json.dumps(kept)) == kept
    assert os.path.normpath(kept) == kept
    assert not kept.startswith(("/", ".."))
    assert kept != "."


@given(ANYTHING, ANYTHING)
@example(".", "%2E")
@example("%", "%25")
@example("x" * 201, "x" * 202)
def test_two_names_stay_two_names(one: str, other: str) -> None:
    assert (storable(one) == storable(other)) is (one == other)


@pytest.mark.parametrize("name", ["loss", "eval/loss", "100%", "f1/NOUN", "_step", "ünïcode", "a b"])
def test_a_usual_name_stays_as_it_is(name: str) -> None:
    assert storable(name) == name


def test_a_name_may_fill_the_bytes_that_its_tags_leave() -> None:
    room = LONGEST_NAME - len("train/")
    for base, whole in (("x" * room, True), ("x" * (room + 1), False)):
        name = SeriesName(base, {"stage": "train"})
        kept = storable(name)
        assert (kept == name) is whole
        assert len(kept) == LONGEST_NAME
        assert split_tags(kept)[1] == {"stage": "train"}


def test_tags_stay_tags() -> None:
    kept = storable(SeriesName("f1/.", {"stage": "train", "class": "x\n" * 100}))
    base, tags = split_tags(kept)
    assert base == "f1/%2E"
    assert tags["stage"] == "train"
    assert tags["class"].isprintable()
    assert len(kept.encode()) <= LONGEST_NAME
