"""Replicas agree on a key and on who takes whose state, from the members of a quorum alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from d9d_torchft.members import Member, donors, key_of, sources


def member(name: str, step: int = 5, lineage: str = "x", **changed: Any) -> Member:
    return replace(Member(name, f"start of {name}", step, lineage, 0, "127.0.0.1:1", ("127.0.0.1:2",)), **changed)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([member("a"), member("b")], {}),
        ([member("a", 4), member("b", 5), member("c", 5)], {"a": "b"}),
        ([member("a", 0, ""), member("b"), member("c", 0, ""), member("d"), member("e", 0, "")],
         {"a": "b", "c": "d", "e": "b"}),
        ([member("a", lineage=""), member("b"), member("c", lineage="")], {"a": "b", "c": "b"}),
        ([member("a", lineage=""), member("b", lineage="")], {"b": "a"}),
        ([member("a", 9, ""), member("b", 5)], {"b": "a"}),
        ([member("a", lineage="x"), member("b", lineage="y"), member("c", lineage="x")], {"b": "a"}),
        ([member("a", 0, "")], {}),
    ],
    ids=["equal", "behind", "several-behind", "restarted", "all-started", "newest-checkpoint", "two-lineages", "alone"],
)  # fmt: skip
def test_replicas_take_the_newest_state_that_runs(members: list[Member], expected: dict[str, str]) -> None:
    assert sources(members) == expected
    assert not {one.name for one in donors(members)} & expected.keys()


def test_a_group_has_another_key_after_a_restart_or_a_failure_but_not_after_a_step() -> None:
    before = [member("a"), member("b")]
    assert re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", key_of(before))
    assert key_of(before) == key_of([replace(one, step=6, lineage="later") for one in before])
    others = [[before[0], replace(before[1], **changed)] for changed in ({"incarnation": "again"}, {"failures": 1})]
    assert len({key_of(members) for members in [before, before[:1], *others]}) == 4


def test_members_of_a_group_keep_its_key_and_members_that_meet_again_get_another() -> None:
    def joined(*names: str) -> str:
        key = key_of([known[name] for name in names])
        for name in names:
            known[name] = replace(known[name], group=key, step=known[name].step + 1)
        return key

    known = {name: member(name) for name in ("a", "b", "c")}
    all_three = joined("a", "b", "c")
    assert joined("a", "b", "c") == all_three
    two = joined("a", "c")
    again = joined("a", "b", "c")
    assert len({all_three, two, again}) == 3
    assert joined("a", "b", "c") == again
    assert len({all_three, two, again, joined("b"), joined("a", "c"), joined("a", "b", "c")}) == 6


def test_a_member_survives_json_and_strange_objects_are_refused() -> None:
    one = member("a", servers=("10.0.0.1:5", "10.0.0.1:6"))
    assert Member.of(one.to_json()) == one
    for values in ({}, {**one.to_json(), "step": "5"}, {**one.to_json(), "servers": [5]}, {**one.to_json(), "more": 1}):
        with pytest.raises(ValueError, match="description of a replica|address of a rank"):
            Member.of(values)
