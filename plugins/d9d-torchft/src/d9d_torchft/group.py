"""Process group over the same rank of all replicas of a quorum: reductions that fail if a replica is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

#: Size of a bucket in bytes, unless a single tensor is larger.
_BUCKET = 64 * 2**20
#: Seconds within which all members of a group must connect; this is short because all of them answered a moment ago.
_CONNECT = 15.0
#: Seconds within which gloo must connect once all members have come; gloo retries a dead member until then.
_GLOO = 5.0
#: Seconds of one attempt to reach the store.
_STORE = 2.0
#: Seconds between two checks whether missing members are alive.
_LOOK = 0.3
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ReplicaGroup:
    """Process groups of torch over replicas, apart from torch's default group: gloo, and NCCL for tensors on GPUs.

    Collective over the members at its construction.

    Args:
        store: ``host:port`` of a store that all members reach.
        key: key of the group, used once; prefix of its names in the store.
        index: index of this replica among the members.
        count: number of members.
        address: numeric address of this machine on which gloo listens.
        timeout: seconds after which an operation fails.
        device: device of this process.
        lives: function that tells whether the member with an index is alive; called for members that do not connect.

    Raises:
        RuntimeError: a member died, or the members did not connect in time.
    """

    def __init__(
        self,
        store: str,
        key: str,
        index: int,
        count: int,
        address: str,
        timeout: float,
        device: torch.device,
        lives: Callable[[int], bool],
    ) -> None:
        self._timeout = timeout
        client = _client(store, lives)
        _await_all(client, key, index, count, lives)
        self._works: list[dist.Work] = []
        gloo: Any = dist.ProcessGroupGloo  # torch does not type its methods
        options = gloo._Options()  # noqa: SLF001 - no public function sets the address of a device
        options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
        options._timeout = timedelta(seconds=_GLOO)  # noqa: SLF001
        below = dist.PrefixStore(f"{key}/gloo", client)  # type: ignore[attr-defined]
        self._gloo: Any = gloo(below, index, count, options)
        self._gloo.set_timeout(timedelta(seconds=timeout))
        self._nccl: Any = None
        if device.type == "cuda":
            below = dist.PrefixStore(f"{key}/nccl", client)  # type: ignore[attr-defined]
            chosen = dist.ProcessGroupNCCL.Options()
            chosen._timeout = timedelta(seconds=timeout)  # noqa: SLF001
            self._nccl = dist.ProcessGroupNCCL(below, index, count, chosen)

    def reduce(self, tensors: Sequence[Tensor], operation: Literal["sum", "max", "min"]) -> None:
        """Reduce tensors in place over the members. On a GPU, :meth:`landed` tells whether the reduction succeeded.

        Raises:
            RuntimeError: a member was lost.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            if not flat.numel():
                continue
            backend = self._gloo if flat.device.type == "cpu" or self._nccl is None else self._nccl
            work = backend.allreduce([flat], options)
            work.wait()  # on a GPU, only its stream waits
            if backend is not self._gloo:
                self._works.append(work)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(list(bucket), [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def all(self, held: bool) -> bool:
        """Whether ``held`` is true on all members. Collective over the members.

        Raises:
            RuntimeError: a member was lost.
        """
        flag = torch.tensor([int(held)], dtype=torch.int32)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._gloo.allreduce([flag], options).wait()
        return bool(flag.item())

    @property
    def launched(self) -> bool:
        """Whether operations on a GPU may still be running."""
        return bool(self._works)

    def landed(self) -> bool:
        """Wait until all operations on a GPU are complete; false if one failed or takes too long."""
        works, self._works = self._works, []
        deadline = time.monotonic() + self._timeout
        try:
            while not all(work.is_completed() for work in works):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
            return all(work.is_success() for work in works) if works else True
        except RuntimeError:
            return False

    def abort(self) -> None:
        """End all operations and connections, so that other members notice at once that this one is gone."""
        for group in (self._nccl, self._gloo):
            if group is not None:
                with suppress(RuntimeError):
                    group.abort()


def _client(store: str, lives: Callable[[int], bool]) -> Any:
    """Connect to the store of member 0, which may die meanwhile.

    Raises:
        RuntimeError: member 0 has died, or its store does not answer.
    """
    host, _, port = store.rpartition(":")
    deadline = time.monotonic() + _CONNECT
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=timedelta(seconds=_STORE), wait_for_workers=False
            )
        except RuntimeError:
            if time.monotonic() > deadline or not lives(0):
                raise


def _await_all(store: Any, key: str, index: int, count: int, lives: Callable[[int], bool]) -> None:
    """Wait until all members have come to the store; without this, gloo would wait for a dead one until its timeout.

    Raises:
        RuntimeError: a member has died, or does not come.
    """
    store.set(f"{key}/here/{index}", "")
    missing = set(range(count)) - {index}
    deadline, look = time.monotonic() + _CONNECT, time.monotonic() + _LOOK
    while missing := {other for other in missing if not store.check([f"{key}/here/{other}"])}:
        time.sleep(0.002)
        if time.monotonic() > look:
            look += _LOOK
            if time.monotonic() > deadline or not all(lives(other) for other in missing):
                raise RuntimeError(f"members {sorted(missing)} of the group did not come")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors into lists, each of one dtype and one device and of at most ``_BUCKET`` bytes (or one tensor)."""
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    for kind in kinds:
        held: list[Tensor] = []
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            if held and sum(one.nbytes for one in held) + tensor.nbytes > _BUCKET:
                yield held
                held = []
            held.append(tensor)
        yield held
