"""Joins and leaves the default process group that the environment variables of the process describe."""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from d9d_core.errors import JobError, TrainingError
from torch import distributed as dist

from d9d_engine.distributed.mesh import describe_rank
from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision.failure import FailureReporter
from d9d_engine.supervision.hang_report import FAILED, Alarm, claim_failure
from d9d_engine.supervision.identity import Identity, Store, agree, wait_until
from d9d_engine.supervision.watchdog import Watchdog

#: Seconds added to the longest limit, so that the watchdog reports before a backend's timeout.
_BACKEND_MARGIN = 60.0
#: Seconds within which the name of the rendezvous must resolve.
_NAME_SECONDS = 30.0
#: Seconds of one attempt to connect to the rendezvous, and between two attempts.
_ATTEMPT, _BETWEEN_ATTEMPTS = 10.0, 0.2
#: Seconds for which rank 0 serves the store after its own failure; shorter than the time that its launcher waits.
_CLAIM_SECONDS = 1.5
#: Variables with the network interface on which a backend listens.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class World:
    """World of a job's processes, as seen by one of them.

    Attributes:
        env: rank and sizes of this process.
        store: key-value store shared by all ranks, which needs no communicator.
        watchdog: enforces the time limits of phases.
    """

    env: ProcessEnv
    store: Store
    watchdog: Watchdog


@contextmanager
def joined(
    env: ProcessEnv,
    device: torch.device,
    identity: Identity,
    sizes: Mapping[str, int],
    timeouts: Mapping[str, float],
    reporter: FailureReporter | None = None,
) -> Iterator[World]:
    """Join the default process group of all ranks inside the block, and leave it afterwards. Collective over all ranks.

    The ranks compare their jobs and versions before communicators are created. An existing default process group is
    used and not destroyed.

    Args:
        env: rank and sizes of this process.
        device: device of this process.
        identity: jobs, plugins and versions, which must be equal on all ranks.
        sizes: mesh axis -> size, for messages.
        timeouts: ``startup``, ``step`` and ``checkpoint`` in seconds.
        reporter: tells the user why this rank failed, before the exception propagates out of the block; by default, the
            exception only propagates.

    Raises:
        JobError: ranks have different jobs or software, or the rendezvous has no address that resolves.
        PluginError: ranks have different plugins.
        TrainingError: ranks did not arrive in time, or this rank cannot reach the rendezvous.
    """
    with _loopback(env):
        who = f"{describe_rank(sizes, env.rank)} on {env.node}"
        store = _rendezvous_store(env, timeouts["startup"])

        tell = reporter or FailureReporter(who, None)

        def claim(name: str) -> str:
            # The process that served the store may have ended since another rank's failure was noticed.
            if (known := watchdog.first_failure) is not None:
                first, tell.exit_code = known
                return first
            first, tell.exit_code = claim_failure(store, name, tell.exit_code)
            if env.rank:
                store.add("claims", 1)
            return first

        watchdog = Watchdog(timeouts, who, changed=lambda: _set_timeouts(watchdog.longest + _BACKEND_MARGIN))
        own = False
        try:
            agree(store, env, identity, timeouts["startup"])
            own = not dist.is_initialized()
            if own:
                _init(env, device, store, timeouts["startup"])
            if env.world_size > 1:
                shortest = min(timeouts.values())
                alarm = Alarm(
                    # Use a separate connection, because the main thread may be waiting for the store.
                    store.clone(),
                    env.rank,
                    env.world_size,
                    tell=lambda failure: tell.tell(failure, claim),
                    grace=min(10.0, max(2.0, shortest / 4)),
                )
                # Each rank polls the store, so the pause grows with the number of ranks.
                watchdog.start(alarm, pause=min(max(1.0, env.world_size / 1000), shortest / 4))
            yield World(env, store, watchdog)
        except BaseException as error:
            # Report before connections close: the other ranks read from the store which rank failed first.
            if reporter is not None and isinstance(error, Exception) and reporter.raised(error, claim):
                watchdog.fails_first()
            elif isinstance(error, KeyboardInterrupt):
                watchdog.interrupted()
            watchdog.stop()
            if own and dist.is_initialized():
                _abort()
            if env.rank == 0 and env.world_size > 1 and not _is_served():
                # This process serves the store, in which the other ranks look for the cause.
                _quietly(lambda: wait_until(lambda: store.add("claims", 0) >= env.world_size - 1, _CLAIM_SECONDS, 0.05))
            raise
        watchdog.stop()
        if own:
            _leave_together(store, env, timeouts["startup"])
            dist.destroy_process_group()


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process, including the default one and groups made by libraries."""
    # torch has no public list of process groups.
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]  # noqa: SLF001


def _rendezvous_store(env: ProcessEnv, timeout: float) -> Store:
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one these ranks share
        # A world may be joined several times; each time needs fresh keys, the same on all ranks.
        return _prefixed(f"d9d/{store.add(f'd9d/joins/{dist.get_rank()}', 1)}", store)
    if env.master is not None:
        # After a restart, the processes find the same server, so the number of restarts gives them fresh keys.
        return _prefixed(f"d9d/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _connect(env, env.master, timeout))
    if env.world_size > 1:
        raise JobError(f"{env.world_size} processes need MASTER_ADDR and MASTER_PORT to meet; torchrun sets both")
    return _prefixed("d9d", dist.HashStore())  # type: ignore[attr-defined]


def _is_served() -> bool:
    """Whether torchrun's agent or d9d's launcher serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _connect(env: ProcessEnv, master: tuple[str, int], timeout: float) -> Store:
    # torch.distributed.rendezvous cannot be used: it waits until all ranks have come, and does not tell which ones are
    # missing.
    served = _is_served()
    host, port = master
    if not served and env.local_world_size == env.world_size:
        host = _LOOPBACK
    serves = env.rank == 0 and not served
    deadline = time.monotonic() + timeout
    _wait_for_name(env, host, port, min(timeout, _NAME_SECONDS))
    try:
        listening = _listening_at(host, port) if serves else None
        if not serves:
            # TCPStore would wait up to twice its timeout: its second attempt has the whole timeout again.
            _wait_for_server(host, port, deadline)
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            env.world_size,
            is_master=serves,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
        store.set_timeout(timedelta(seconds=timeout))  # of later requests
    except (dist.DistNetworkError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"rank {env.rank} on {env.node} cannot meet the other ranks at {host}:{port} within {timeout:g} s "
            f"(timeouts.startup); did rank 0 start there, and is the port free? {reason}"
        ) from error
    connected: Store = store
    return connected


def _wait_for_server(host: str, port: int, deadline: float) -> None:
    """Wait until the server of the store accepts a connection.

    Args:
        host: name or address of the server.
        port: port of the server.
        deadline: time of ``time.monotonic`` until which to try.

    Raises:
        OSError: no attempt succeeded; the reason of the last attempt.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(_ATTEMPT, left))) as connection:
                # If no process listens, Linux may give the connection the server's port, and connect it with itself.
                if connection.getsockname() != connection.getpeername():
                    return
        except OSError:
            if time.monotonic() + _BETWEEN_ATTEMPTS > deadline:
                raise
        time.sleep(_BETWEEN_ATTEMPTS)


def _wait_for_name(env: ProcessEnv, host: str, port: int, seconds: float) -> None:
    """Wait until the name of the rendezvous resolves: a cluster publishes the names of new machines with a delay.

    Raises:
        JobError: the name does not resolve. TCPStore would try it until its timeout, and not name the cause.
    """
    reasons: list[str] = []

    def resolves() -> bool:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            reasons.append(error.strerror or str(error))
            return False
        return True

    if not wait_until(resolves, seconds, 1.0):
        raise JobError(
            f"rank {env.rank} on {env.node} cannot resolve '{host}', the machine of the rendezvous: {reasons[-1]}; "
            "correct the machine's names, or give an address that all machines reach (--master, or MASTER_ADDR)"
        )


def _listening_at(host: str, port: int) -> int | None:
    """File descriptor of a socket that listens at one address only; ``None`` if the host is given by name.

    A name may resolve to another address here than on other machines, such as 127.0.1.1 for this machine's own name.
    """
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family).detach()
    except ValueError:
        return None
    except OSError as error:
        # The address belongs to a router in front of this machine, or a store of this process already listens there.
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise


def _prefixed(prefix: str, store: Any) -> Store:
    below: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return below


def _init(env: ProcessEnv, device: torch.device, store: Store, timeout: float) -> None:
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    hook = sys.excepthook
    # Pass no device_id: with it, torch would create subgroups by splitting the world, a collective over all ranks, but
    # the topology creates a group on its members only.
    dist.init_process_group(
        backend,
        store=_prefixed("group", store),  # type: ignore[arg-type]
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout),
    )
    if env.world_size == 1:
        sys.excepthook = hook  # torch's hook prefixes every line of a traceback with the rank
        return
    # Gloo connects each rank with all others. If a rank failed right after its own connections were made, other ranks
    # would report broken connections instead of the failure; so wait until all ranks are connected.
    store.add("connected", 1)

    def over() -> bool:
        return store.add("connected", 0) >= env.world_size or store.check([FAILED])

    wait_until(over, timeout, max(0.02, env.world_size / 20_000))


@contextmanager
def _loopback(env: ProcessEnv) -> Iterator[None]:
    """If all ranks are on this machine and the user names no interface, make backends listen on the loopback only.

    For a single process this avoids a warning of gloo about an unknown host name.
    """
    elsewhere = env.world_size > env.local_world_size or platform.system() != "Linux"
    chosen = [] if elsewhere else [name for name in _INTERFACES if name not in os.environ]
    os.environ.update(dict.fromkeys(chosen, "lo"))
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)


def _set_timeouts(seconds: float) -> None:
    # The watchdog enforces the limits of phases. A backend's timeout is the last resort, and equal in all phases: a
    # rank in a short phase may wait for a rank in a long one.
    for group in process_groups():
        group.set_timeout(timedelta(seconds=seconds))


def _leave_together(store: Store, env: ProcessEnv, timeout: float) -> None:
    # Wait through the store, not the process group, so that no rank closes a connection from which another rank still
    # reads, and the process that serves the store stays until the other ranks have made their last request.
    if store.add("left", 1) == env.world_size:
        store.set("all-left", "")

    def over() -> bool:
        return store.check(["all-left"]) or store.check([FAILED])

    _quietly(lambda: wait_until(over, timeout, max(0.02, env.world_size / 20_000)))
    if env.rank == 0:
        _quietly(lambda: wait_until(lambda: store.add("gone", 0) >= env.world_size - 1, 5, 0.02))
    else:
        _quietly(lambda: store.add("gone", 1))


def _abort() -> None:
    # Abort the groups first: destroying a group would wait for pending collectives, which never end.
    for group in process_groups():
        _quietly(group.abort)
    _quietly(dist.destroy_process_group)


def _quietly(call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # failures at the end have no consequences
        call()
