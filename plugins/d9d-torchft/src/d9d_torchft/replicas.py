"""Elastic replicas: in each attempt at a step, a quorum, the transfer of state to new replicas, sums, and a commit."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from d9d_core.elastic import Attempt, LiveState
from d9d_core.errors import TrainingError
from d9d_core.topology import Topology
from torch import Tensor
from torch import distributed as dist

from d9d_torchft.config import TorchFTConfig
from d9d_torchft.coordination import Coordinator, Lighthouse
from d9d_torchft.group import ReplicaGroup
from d9d_torchft.members import Member, donors, key_of, sources
from d9d_torchft.settings import Settings, address_of
from d9d_torchft.transport import Offer, Server, TransportError, fetch, is_there

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Seconds between two quorums while replicas are missing.
_PAUSE = 0.1
#: Type of functions that make the coordinator of a replica, on its first rank.
Coordinators = Callable[[Settings], Coordinator]


def lighthouse_of(settings: Settings) -> Coordinator:
    """Client of the lighthouse that the settings name."""
    return Lighthouse(settings.lighthouse, settings.replica)


class TorchFTReplicas:
    """Elastic replicas (:class:`d9d_core.elastic.ElasticReplicas`) that meet at a lighthouse.

    Nothing is opened before the first :meth:`meet`, so a job with this strategy can be checked anywhere.

    Args:
        config: config of the strategy.
        topology: rank, device and groups of this process in its replica.
        environ: environment variables with the settings of this replica.
        coordinator: function that makes the coordinator, by default a client of the lighthouse.
    """

    def __init__(
        self,
        config: TorchFTConfig,
        topology: Topology,
        environ: Mapping[str, str] = os.environ,
        coordinator: Coordinators = lighthouse_of,
    ) -> None:
        self._config = config
        self._topology = topology
        self._environ = environ
        self._coordinator = coordinator
        self._opened: _Opened | None = None
        self._group: ReplicaGroup | None = None
        self._key = ""  # key of the current group
        self._lineage = ""
        self._failures = 0
        self._lost = False  # whether a replica was lost in this attempt
        self._attempt: Attempt | None = None

    def meet(self, step: int, live: LiveState) -> Attempt | None:
        """Agree on the replicas of the next attempt; see :class:`~d9d_core.elastic.ElasticReplicas`."""
        if self._opened is None:
            self._opened = _Opened(self._config, self._topology, self._environ, self._coordinator)
        deadline = time.monotonic() + self._config.quorum_timeout
        while True:
            members = self._quorum(self._opened, step, deadline, live.stops)
            if members is None:
                return None
            attempt = self._attempted(self._opened, members, live)
            if attempt is not None:
                self._attempt = attempt
                return attempt
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"the replicas {', '.join(one.name for one in members)} could not connect within "
                    f"{self._config.quorum_timeout:g} s (quorum_timeout); can they reach each other's addresses?"
                )

    def reduce(self, tensors: Sequence[Tensor], operation: Literal["sum", "max", "min"]) -> None:
        """Reduce tensors over the replicas; see :class:`~d9d_core.elastic.ElasticReplicas`."""
        if self._group is None or self._lost:
            return
        try:
            self._group.reduce(tensors, operation)
        except RuntimeError:
            self._lost = True

    def commit(self) -> bool:
        """Whether all ranks of all replicas have all results; see :class:`~d9d_core.elastic.ElasticReplicas`."""
        assert self._opened is not None
        assert self._attempt is not None
        held = not self._lost
        if self._group is not None and self._group.launched:
            # Ask over gloo first: it notices a lost replica at once, NCCL only after its timeout.
            held = self._agreed(held) and self._group.landed()
        if not self._agreed(held):
            self._fail()
            return False
        self._opened.server.withdraw()
        self._lineage = self._attempt.key
        return True

    def close(self) -> None:
        """Leave the other replicas; see :class:`~d9d_core.elastic.ElasticReplicas`."""
        self._leave_group()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _quorum(self, opened: _Opened, step: int, deadline: float, stops: Callable[[], bool]) -> list[Member] | None:
        """Members of the next attempt, sorted by name. Collective over the ranks of this replica.

        ``None`` if the first rank was asked to stop.
        """
        topology, config = self._topology, self._config
        while True:
            answer: dict[str, Any] = {}
            if opened.coordinator is not None:
                member = opened.member(step, self._lineage, self._failures, self._key)
                try:
                    left = max(1.0, deadline - time.monotonic())
                    found = None if stops() else opened.coordinator.quorum(member, left, stops)
                    answer["members"] = None if found is None else [one.to_json() for one in found]
                except TrainingError as error:
                    answer["error"] = str(error)
            answer = from_first_rank(topology, answer)
            if "error" in answer:
                raise TrainingError(answer["error"])
            if answer["members"] is None:
                return None
            members = [Member.of(one) for one in answer["members"]]
            self._check(opened, members)
            if len(members) >= config.min_replicas:
                return members
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"{len(members)} of {config.min_replicas} replicas (min_replicas) came within "
                    f"{config.quorum_timeout:g} s (quorum_timeout); start more replicas, or lower min_replicas"
                )
            time.sleep(_PAUSE)

    def _check(self, opened: _Opened, members: Sequence[Member]) -> None:
        own = next((one for one in members if one.name == opened.settings.replica), None)
        if own is None or own.incarnation != opened.incarnation:
            raise TrainingError(
                f"another process is the replica '{opened.settings.replica}'; give each replica its own name "
                "(D9D_TORCHFT_REPLICA), and each job its own lighthouse"
            )
        for one in members:
            if len(one.servers) != self._topology.world_size:
                raise TrainingError(
                    f"replica '{one.name}' has {len(one.servers)} ranks, this one {self._topology.world_size}; start "
                    "all replicas with the same mesh"
                )

    def _attempted(self, opened: _Opened, members: Sequence[Member], live: LiveState) -> Attempt | None:
        """Connect the members, and take a member's state if necessary; ``None`` if a member was lost meanwhile."""
        name, key = opened.settings.replica, key_of(members)
        names = tuple(one.name for one in members)
        self._lost = False
        giving = donors(members)
        commit = f"{key}/{giving[0].step}"
        if key != self._key and not all_ranks(self._topology, self._connected(opened, members, key)):
            opened.server.refuse(commit)
            self._fail()
            return None
        taken = sources(members)
        if name in taken.values():
            opened.server.offer(Offer(commit, live.values(), live.tensors()))
        source = taken.get(name)
        if source is not None:
            donor = next(one for one in members if one.name == source)
            state = self._fetched(opened, donor, commit, live)
            if not all_ranks(self._topology, state is not None):
                self._fail()
                return None
            assert state is not None
            live.take(*state)
        self._lineage = giving[0].lineage or commit
        return Attempt(names.index(name), names, commit, source)

    def _connected(self, opened: _Opened, members: Sequence[Member], key: str) -> bool:
        """Connect this rank with the same rank of all other members; false if one of them is lost."""
        self._leave_group()
        rank, index = self._topology.rank, [one.name for one in members].index(opened.settings.replica)

        def lives(other: int) -> bool:
            try:
                return is_there(members[other].servers[rank], opened.token)
            except TransportError as error:
                raise TrainingError(f"replica '{members[other].name}' cannot take part: {error}") from error

        if not all(lives(other) for other in range(len(members)) if other != index):
            return False
        if len(members) > 1:
            facts = (f"{key}/{rank}", index, len(members), opened.address, self._config.timeout)
            try:
                self._group = ReplicaGroup(members[0].store, *facts, self._topology.device, lives)
            except RuntimeError:
                return False
        self._key = key
        return True

    def _fetched(
        self, opened: _Opened, donor: Member, key: str, live: LiveState
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State of the same rank of another replica; ``None`` if that replica was lost."""
        address = donor.servers[self._topology.rank]
        try:
            return fetch(address, opened.token, key, live.tensors(), self._config.timeout)
        except OSError:
            return None
        except TransportError as error:
            raise TrainingError(f"the state of replica '{donor.name}' cannot be taken: {error}") from error

    def _agreed(self, held: bool) -> bool:
        """Whether ``held`` is true on all ranks of all replicas; false if a replica does not answer."""
        # Ask the ranks of this replica first: if one of them has failed, this replica must not agree with others.
        if not all_ranks(self._topology, held):
            return False
        if self._group is None:
            return True
        try:
            held = self._group.all(True)
        except RuntimeError:
            held = False
        return all_ranks(self._topology, held)

    def _fail(self) -> None:
        self._failures += 1  # gives a group of the same members a new key
        self._leave_group()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._key = None, ""


class _Opened:
    """Open connections of a replica: the server of its state, its store, and its coordinator.

    Collective over the ranks of the replica.
    """

    def __init__(
        self, config: TorchFTConfig, topology: Topology, environ: Mapping[str, str], coordinator: Coordinators
    ) -> None:
        self.settings = Settings.of(environ)
        self.token = self.settings.token
        self.address = address_of(config.interface)
        self.server = Server(self.address, self.token, config.timeout)
        self.coordinator = coordinator(self.settings) if topology.rank == 0 else None
        own = {"incarnation": secrets.token_hex(8), "store": ""}
        if topology.rank == 0:
            # Pass a socket that listens at this address only: torch's store by itself would listen on all interfaces.
            listening = socket.create_server((self.address, 0))
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self.address,
                port,
                is_master=True,
                timeout=timedelta(seconds=config.timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            own["store"] = f"{self.address}:{port}"
        shared = from_first_rank(topology, own)
        self.incarnation: str = shared["incarnation"]
        self._shared_store: str = shared["store"]
        self._servers = gathered(topology, self.server.address)

    def member(self, step: int, lineage: str, failures: int, group: str) -> Member:
        """Describe this replica."""
        name, store, servers = self.settings.replica, self._shared_store, self._servers
        return Member(name, self.incarnation, step, lineage, failures, store, servers, group)

    def close(self) -> None:
        """Leave the quorum, and stop listening."""
        if self.coordinator is not None:
            self.coordinator.close()
        self.server.close()


def all_ranks(topology: Topology, held: bool) -> bool:
    """Whether ``held`` is true on all ranks of this replica. Collective over these ranks."""
    group = topology.axes_group(*_AXES)
    if group is None:
        return held
    flag = torch.tensor([int(held)], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def gathered(topology: Topology, text: str) -> tuple[str, ...]:
    """Gather a text of at most 64 bytes from each rank of this replica, in order. Collective over the ranks."""
    group = topology.axes_group(*_AXES)
    if group is None:
        return (text,)
    size = 64
    table = torch.zeros(topology.world_size, size, dtype=torch.uint8)
    table[topology.rank, : len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.all_reduce(table, group=group)
    return tuple(bytes(row.tolist()).rstrip(b"\0").decode() for row in table)


def from_first_rank(topology: Topology, values: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcast a JSON object from the first rank of this replica. Collective over the replica's ranks."""
    group = topology.axes_group(*_AXES)
    if group is None:
        return dict(values)
    block = json.dumps(values).encode() if topology.rank == 0 else b""
    size = torch.tensor([len(block)], dtype=torch.int64)
    dist.broadcast(size, group_src=0, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if block:
        data = torch.tensor(list(block), dtype=torch.uint8)
    dist.broadcast(data, group_src=0, group=group)
    found: dict[str, Any] = json.loads(bytes(data.tolist()))
    return found
