"""Collectives of a job, recorded on a running rank and compared with the collectives that the job's plan lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from d9d_core.events import StepEnds, StepStarts
from d9d_core.strategy import Collective, Kind
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_testing.layouts import job_of, topology_here

#: Torch operator -> kind of collective, and index of the argument whose bytes count
#: (:class:`d9d_core.strategy.Collective`).
_OPERATORS: Mapping[str, tuple[Kind, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
#: Operators of the same namespaces that do not communicate.
_SILENT = ("wait_tensor", "monitored_barrier_")


class Call(NamedTuple):
    """Call of a collective on this rank.

    Attributes:
        kind: kind of the collective; torch's operator name for kinds that :class:`~d9d_core.strategy.Collective` lacks.
        ranks: global ranks of the group; for a send or a receive, this rank and the peer, in ascending order.
        bytes: bytes, counted as in :class:`d9d_core.strategy.Collective`.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records collectives of this thread, and of CPU backwards; collectives over one rank are left out.

    Attributes:
        calls: recorded calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, if it is a collective, and make it."""
        name = func._schema.name  # noqa: SLF001 - torch's own modes read it
        space, _, operator = name.partition("::")
        if space in ("c10d", "_c10d_functional") and operator not in _SILENT:
            kind, counted = _OPERATORS.get(name, (name, 0))
            named = {
                argument.name: value
                for argument, value in zip(func._schema.arguments, args, strict=False)  # noqa: SLF001
            }
            group = _group({**named, **(kwargs or {})})
            ranks = tuple(dist.get_process_group_ranks(group))
            size = _bytes(args[counted])
            if name == "_c10d_functional::all_gather_into_tensor":
                size *= len(ranks)  # the argument is one rank's part of the gathered tensor
            if kind in ("send", "receive"):
                ranks = tuple(sorted((dist.get_rank(), dist.get_global_rank(group, args[2]))))
            if len(ranks) > 1:
                self.calls.append(Call(kind, ranks, size))
        return func(*args, **(kwargs or {}))


class StepRecorder:
    """Subscriber that records the collectives of each step.

    Attributes:
        steps: recorded calls of each finished step.
    """

    def __init__(self) -> None:
        self.steps: list[list[Call]] = []
        self._mode = CollectiveRecorder()

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the events at the beginning and the end of each step."""
        return [(StepStarts, self._begin), (StepEnds, self._end)]

    def _begin(self, _event: StepStarts) -> None:
        self._mode = CollectiveRecorder()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, _event: StepEnds) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.steps.append(self._mode.calls)


def recorded_step(values: Mapping[str, Any], plugins: Sequence[str]) -> list[tuple[str, tuple[int, ...], int]]:
    """Train a job and return the calls of its last step on this rank. Collective over a world.

    The last step is returned because connections are opened in the first.
    """
    job, recorder = job_of(values, plugins), StepRecorder()
    job.build(lambda _text: None, topology_here(job), observers=[recorder]).train()
    return [(call.kind, call.ranks, call.bytes) for call in recorder.steps[-1]]


def listed_step(values: Mapping[str, Any], plugins: Sequence[str], rank: int) -> list[Collective]:
    """Collectives that a job's plan lists for a step on a rank; starts no process."""
    return [entry.collective for entry in job_of(values, plugins).plan(rank=rank).collectives.entries]


def differences(listed: Iterable[Collective], recorded: Iterable[tuple[str, tuple[int, ...], int]]) -> list[str]:
    """Differences between listed and recorded collectives, one line each; empty if the list is right.

    Calls of known size must be recorded exactly as often as listed. Calls of approximate or unknown size must be
    recorded as often as listed; their total bytes, for a kind over the same ranks, may differ by a factor of two, and
    are not compared if a size is unknown. Calls listed with an upper bound may be recorded less often.

    Args:
        listed: collectives of a plan.
        recorded: kind, ranks and bytes of each call.
    """
    exact: Counter[Call] = Counter()
    loose: dict[tuple[str, tuple[int, ...]], list[Collective]] = {}
    for one in listed:
        if one.approximate or one.at_most or one.bytes is None:
            loose.setdefault((one.kind, one.ranks), []).append(one)
        else:
            exact[Call(one.kind, one.ranks, one.bytes)] += one.count
    found = Counter(Call(*call) for call in recorded)
    lines = [
        f"{call.kind} of {call.bytes} bytes among {call.ranks}: listed {count} times, made {found[call]} times"
        for call, count in exact.items()
        if found[call] < count
    ]
    rest: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for call, count in (found - exact).items():
        rest.setdefault((call.kind, call.ranks), []).extend([call.bytes] * count)
    for key in rest.keys() | loose.keys():
        lines += _loose_differences(f"{key[0]} among {key[1]}", loose.get(key, []), rest.get(key, []))
    return sorted(lines)


def _loose_differences(what: str, listed: Sequence[Collective], sizes: Sequence[int]) -> list[str]:
    most = sum(one.count for one in listed)
    least = sum(one.count for one in listed if not one.at_most)
    if not least <= len(sizes) <= most:
        span = f"{least} to {most}" if least < most else str(most)
        return [
            f"{what}: in addition to exactly listed calls, listed {span} times, made {len(sizes)} times: {sizes} bytes"
        ]
    if any(one.bytes is None for one in listed):
        return []
    at_most = sum((one.bytes or 0) * one.count for one in listed)
    at_least = sum((one.bytes or 0) * one.count for one in listed if not one.at_most)
    if not at_least / 2 <= sum(sizes) <= 2 * at_most:
        return [f"{what}: {sum(sizes)} bytes, listed {at_least} to {at_most}"]
    return []


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    given = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    c10d: Any = dist.distributed_c10d
    group = c10d._resolve_process_group(given) if isinstance(given, str) else given  # noqa: SLF001 - no public function
    assert isinstance(group, dist.ProcessGroup), f"no process group among {sorted(arguments)}"
    return group


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_bytes(part) for part in value)
