"""From a process's place to a process group that works, and out of it again."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from d9d_core.errors import JobError, TrainingError
from d9d_core.topology.agreement import Identity, Store, agree, wait_until
from d9d_core.topology.alarm import FAILED, Alarm
from d9d_core.topology.failure import Teller
from d9d_core.topology.mesh import describe_rank
from d9d_core.topology.place import Place
from d9d_core.topology.watchdog import Watchdog

#: The watchdog's report comes before any backend's own.
_BACKEND_MARGIN = 60.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class World:
    """All processes of a job, as one of them sees them.

    Attributes:
        place: this process.
        store: what ranks tell each other without a communicator.
        watchdog: to be told what the process is about to do.
    """

    place: Place
    store: Store
    watchdog: Watchdog


@contextmanager
def joined(
    place: Place,
    device: torch.device,
    identity: Identity,
    sizes: Mapping[str, int],
    timeouts: Mapping[str, float],
    teller: Teller | None = None,
) -> Iterator[World]:
    """Be one rank of a process group inside the block. Collective over all ranks.

    First the ranks compare what they are about to run; only then are communicators made. A default process group that
    exists already is used as it is, and left.

    Args:
        place: this process.
        device: what it computes on.
        identity: what must be equal on all ranks.
        sizes: mesh axis -> size, for messages.
        timeouts: ``startup``, ``step`` and ``checkpoint`` in seconds.
        teller: tells the user why this rank failed; by default an exception just leaves the block.

    Raises:
        JobError: jobs or software differ between ranks.
        PluginError: loaded plugins differ between ranks.
        TrainingError: ranks did not arrive in time.
    """
    who = f"{describe_rank(sizes, place.rank)} on {place.node}"
    store = _meet(place, timeouts["startup"])

    def claim(name: str) -> str:
        return store.compare_set(FAILED, "", name).decode()

    watchdog = Watchdog(timeouts, who, changed=lambda: _set_timeouts(max(timeouts.values()) + _BACKEND_MARGIN))
    own = False
    try:
        agree(store, place, identity, timeouts["startup"])
        own = not dist.is_initialized()
        if own:
            _init(place, device, store, timeouts["startup"])
        if place.world_size > 1:
            tell = teller or Teller(who, None)
            shortest = min(timeouts.values())
            alarm = Alarm(
                # A connection of its own: the main thread may be waiting for the store.
                store.clone(),
                place.rank,
                place.world_size,
                tell=lambda failure: tell.tell(failure, claim),
                grace=min(10.0, max(2.0, shortest)),
            )
            # Each rank asks the store: seldom enough for thousands of them.
            watchdog.start(alarm, pause=min(max(1.0, place.world_size / 1000), shortest / 4))
        yield World(place, store, watchdog)
    except BaseException as error:
        if teller is not None and isinstance(error, Exception):
            # Before connections close: the others must find out who was first.
            teller.raised(error, claim)
        watchdog.stop()
        if own and dist.is_initialized():
            _abort()
        raise
    watchdog.stop()
    if own:
        _leave_together(store, place, timeouts["startup"])
        dist.destroy_process_group()


def process_groups() -> list[dist.ProcessGroup]:
    """All groups of this process, the default one included, whoever made them."""
    # torch has no public list. Groups of libraries must be found, too.
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]  # noqa: SLF001


def _meet(place: Place, timeout: float) -> Store:
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one these ranks share
        # A world may be joined several times; each time needs fresh keys, the same on all ranks.
        return _below(f"d9d/{store.add(f'd9d/joins/{dist.get_rank()}', 1)}", store)
    if place.master is not None:
        # Processes that the agent starts anew find the same server.
        return _below(
            f"d9d/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _connect(place, place.master, timeout)
        )
    if place.world_size > 1:
        raise JobError(f"{place.world_size} processes need MASTER_ADDR and MASTER_PORT to meet; torchrun sets both")
    return _below("d9d", dist.HashStore())  # type: ignore[attr-defined]


def _connect(place: Place, master: tuple[str, int], timeout: float) -> Store:
    # torchrun's agent may serve a store already, and says so; see torch.distributed.rendezvous, which cannot be used:
    # it waits until all have come, and does not tell who is missing.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            *master,
            place.world_size,
            is_master=place.rank == 0 and not served,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"rank {place.rank} on {place.node} cannot meet the others at {master[0]}:{master[1]} within {timeout:g} s "
            f"(timeouts.startup); did rank 0 start there, and is the port free? {reason}"
        ) from error
    return store


def _below(prefix: str, store: Any) -> Store:
    below: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return below


def _init(place: Place, device: torch.device, store: Store, timeout: float) -> None:
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    hook = sys.excepthook
    with _loopback(place):
        # No device_id: subgroups would then be split from the whole world, by all of its ranks together, but the
        # topology has only the members of a group make it.
        dist.init_process_group(
            backend,
            store=_below("group", store),  # type: ignore[arg-type]
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
    if place.world_size == 1:
        sys.excepthook = hook  # torch's puts the rank in front of every line of a traceback


@contextmanager
def _loopback(place: Place) -> Iterator[None]:
    # Alone, gloo needs no network, but warns where the host's own name is unknown.
    if place.world_size > 1 or _GLOO_INTERFACE in os.environ or platform.system() != "Linux":
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def _set_timeouts(seconds: float) -> None:
    # The watchdog enforces the limits of phases. A backend's own limit is the last resort, and the same in all phases:
    # a rank that is in a short phase may be waiting for one that is in a long phase.
    for group in process_groups():
        group.set_timeout(timedelta(seconds=seconds))


def _leave_together(store: Store, place: Place, timeout: float) -> None:
    # Through the store, not the group: nobody closes a connection that another rank still reads from, and the process
    # that serves the store is not gone before the others have asked their last question.
    if store.add("left", 1) == place.world_size:
        store.set("all-left", "")

    def over() -> bool:
        return store.check(["all-left"]) or store.check([FAILED])

    _quietly(lambda: wait_until(over, timeout, max(0.02, place.world_size / 20_000)))
    if place.rank == 0:
        _quietly(lambda: wait_until(lambda: store.add("gone", 0) >= place.world_size - 1, 5, 0.02))
    else:
        _quietly(lambda: store.add("gone", 1))


def _abort() -> None:
    # Destroying waits for what is under way, which will never end.
    for group in process_groups():
        _quietly(group.abort)
    _quietly(dist.destroy_process_group)


def _quietly(call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # what else goes wrong at the end has no further consequence
        call()
