"""Members of a quorum, and the replica from which each of them takes its state. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Member:
    """Replica in a quorum, as it describes itself.

    Attributes:
        name: name of the replica, the same after each of its restarts.
        incarnation: random text, new at each start of the replica.
        step: number of completed steps.
        lineage: key that all replicas with this state share: the key of the last committed attempt, or before the first
            commit, of the attempt in which they took the same state; empty before the first attempt.
        failures: number of this incarnation's attempts that failed. The key of a group depends on it, so after a
            failure the same members form a group with a new key.
        store: ``host:port`` of the replica's store, in which the ranks of all replicas can meet.
        servers: ``host:port`` of the transport of each rank.
        group: key of the group that connects the replica's ranks with others; empty without a group.
    """

    name: str
    incarnation: str
    step: int
    lineage: str
    failures: int
    store: str
    servers: tuple[str, ...]
    group: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON object that :meth:`of` reads."""
        return {**asdict(self), "servers": list(self.servers)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Member:
        """Read a member from the JSON object of another replica.

        Raises:
            ValueError: the object does not describe a member of this version.
        """
        kinds = {
            "name": str, "incarnation": str, "step": int, "lineage": str, "failures": int, "store": str,
            "servers": list, "group": str,
        }  # fmt: skip
        if values.keys() != kinds.keys() or any(type(values[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("no description of a replica of this version of d9d-torchft")
        if not all(isinstance(server, str) for server in values["servers"]):
            raise ValueError("an address of a rank is not a text")
        return replace(cls(**values), servers=tuple(values["servers"]))


def key_of(members: Sequence[Member]) -> str:
    """Key of the group of these members, which does not depend on their steps.

    If all of them are connected in a group of exactly these members, the group's key is kept. Otherwise the key is new:
    it depends on incarnations, failures and groups, because the store keeps the addresses of earlier groups.
    """
    names, groups = _digest([member.name for member in members]), {member.group for member in members}
    if len(groups) == 1 and (group := groups.pop()).startswith(f"{names}-"):
        return group
    return f"{names}-{_digest([[one.name, one.incarnation, one.failures, one.group] for one in members])}"


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def donors(members: Sequence[Member]) -> list[Member]:
    """Members whose state all replicas continue from; at least one member.

    Only members with the largest step count qualify. Among them, running replicas win over replicas that have just
    started, because the state of a checkpoint may differ in its last bits; and of several lineages, the first member's
    wins.

    Args:
        members: members of a quorum, sorted by name.
    """
    newest = [member for member in members if member.step == max(member.step for member in members)]
    running = [member for member in newest if member.lineage]
    if not running:
        return newest[:1]
    return [member for member in running if member.lineage == running[0].lineage]


def sources(members: Sequence[Member]) -> dict[str, str]:
    """Map each replica that must take a state to the replica that gives it; takers are spread over all donors.

    Args:
        members: members of a quorum, sorted by name.
    """
    giving = [member.name for member in donors(members)]
    taking = [member.name for member in members if member.name not in giving]
    return {name: giving[index % len(giving)] for index, name in enumerate(taking)}
