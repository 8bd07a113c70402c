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
        incarnation: random text of this start of the replica.
        step: number of steps done.
        lineage: text that names the commit after which the state was the same in all its replicas; empty if the state
            comes from a checkpoint or from the initialisation.
        failures: number of attempts of this incarnation that failed; a group of the same members gets a new key.
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
    """Key of the group of some members, whatever their steps.

    Members that are all in the group of exactly these members keep its key. Other members get a new key, which depends
    on their incarnations, failures and groups, because the store keeps the addresses of earlier groups.
    """
    names, groups = _digest([member.name for member in members]), {member.group for member in members}
    if len(groups) == 1 and (group := groups.pop()).startswith(f"{names}-"):
        return group
    return f"{names}-{_digest([[one.name, one.incarnation, one.failures, one.group] for one in members])}"


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def donors(members: Sequence[Member]) -> list[Member]:
    """Members with the state that all replicas continue from; one of them at least.

    The largest step wins. Among members with that step, running replicas win over replicas that have just started, as
    the state of a checkpoint may differ in its last bits; and the first lineage wins over others.

    Args:
        members: members of a quorum, sorted by name.
    """
    newest = [member for member in members if member.step == max(member.step for member in members)]
    running = [member for member in newest if member.lineage]
    if not running:
        return newest[:1]
    return [member for member in running if member.lineage == running[0].lineage]


def sources(members: Sequence[Member]) -> dict[str, str]:
    """Replica that takes another's state -> that other replica; the load is spread over all donors.

    Args:
        members: members of a quorum, sorted by name.
    """
    giving = [member.name for member in donors(members)]
    taking = [member.name for member in members if member.name not in giving]
    return {name: giving[index % len(giving)] for index, name in enumerate(taking)}
