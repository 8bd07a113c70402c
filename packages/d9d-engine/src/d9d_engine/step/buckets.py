"""All-reduce of gradients in flat buckets, while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from d9d_core.tensors import local
from torch import Tensor, nn
from torch import distributed as dist

#: A gradient of at least 1 / _ALONE of a bucket is reduced alone: one more all-reduce costs less than copying the
#: gradient into the bucket and back.
_ALONE = 8
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Member:
    """Parameter whose gradient is in a bucket.

    Attributes:
        parameter: the parameter.
        group: process group of the all-reduce.
        operation: ``sum`` or ``max``.
    """

    parameter: nn.Parameter
    group: dist.ProcessGroup
    operation: str


@dataclass
class Bucket:
    """Bucket of gradients that are all-reduced together, with one group, operation, dtype and device."""

    members: Sequence[Member]
    missing: int = 0
    _flat: Tensor | None = None
    _work: dist.Work | None = field(default=None, repr=False)

    def launch(self) -> None:
        """Start the all-reduce; a missing gradient counts as zeros. Collective over the bucket's group.

        A single gradient is reduced in place.
        """
        parts = []
        for member in self.members:
            parameter = member.parameter
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
            parts.append(local(parameter.grad).reshape(-1))
        self._flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        first = self.members[0]
        self._work = dist.all_reduce(self._flat, _OPERATIONS[first.operation], first.group, async_op=True)

    def land(self) -> None:
        """Write the reduced gradients back. The device waits for the all-reduce; only on the CPU, the host waits."""
        assert self._flat is not None
        if self._work is not None:
            self._work.wait()
        targets = [local(member.parameter.grad) for member in self.members if member.parameter.grad is not None]
        if self._flat.data_ptr() != targets[0].data_ptr():
            parts = torch.split(self._flat, [target.numel() for target in targets])
            torch._foreach_copy_(targets, [p.view_as(t) for p, t in zip(parts, targets, strict=True)])
        self._flat = self._work = None


class Buckets:
    """Buckets that are all-reduced as soon as their gradients exist, in the same order on every rank.

    Gradients are computed from the last layer to the first, so buckets are filled in reverse order of registration. A
    bucket is launched once it and all earlier buckets are complete. Ranks on which a gradient is missing launch the
    remaining buckets at the end in the same order, so that collectives match.

    Args:
        members: parameters in order of registration.
        limit: size of a bucket in bytes; a gradient of at least an eighth of it is reduced alone, without copies.
        overlap: launch during the backward. Only allowed if nothing else communicates over the same ranks meanwhile: a
            rank that lacks a gradient launches later, so the order of communication would differ between ranks.
    """

    def __init__(self, members: Iterable[Member], limit: int, overlap: bool = True) -> None:
        self._buckets = _fill(list(members)[::-1], limit)
        self._armed = False
        self._next = 0
        for index, bucket in enumerate(self._buckets if overlap else ()):
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(self._arrival(index))  # type: ignore[no-untyped-call]

    def sizes(self) -> list[tuple[dist.ProcessGroup, int]]:
        """Process group and bytes of each bucket, which is one all-reduce per step."""
        return [
            (
                bucket.members[0].group,
                sum(local(m.parameter).numel() * _grad_dtype(m.parameter).itemsize for m in bucket.members),
            )
            for bucket in self._buckets
        ]

    def arm(self) -> None:
        """Prepare for the last backward of the step: launch buckets when their gradients become final on this rank."""
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def finish(self) -> None:
        """Launch the remaining buckets, and wait for all of them."""
        self._armed = False
        for bucket in self._buckets[self._next :]:
            bucket.launch()
        for bucket in self._buckets:
            bucket.land()
        self._next = 0

    def _arrival(self, index: int) -> Callable[[Tensor], None]:
        def arrived(_parameter: Tensor) -> None:
            if not self._armed:
                return
            self._buckets[index].missing -= 1
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._buckets[self._next].launch()
                self._next += 1

        return arrived


def _fill(members: Sequence[Member], limit: int) -> list[Bucket]:
    """Distribute members to buckets of equal group, operation, dtype and device; order buckets by last member."""
    done: list[tuple[int, list[Member]]] = []
    open_: dict[tuple[object, ...], tuple[int, list[Member]]] = {}
    last: Mapping[int, int] = {id(member): index for index, member in enumerate(members)}
    for member in members:
        parameter = local(member.parameter)
        own = parameter.numel() * _grad_dtype(member.parameter).itemsize
        if own >= limit // _ALONE:
            done.append((last[id(member)], [member]))
            continue
        key = (member.group, member.operation, _grad_dtype(member.parameter), parameter.device)
        size, found = open_.get(key, (0, []))
        size += own
        found.append(member)
        open_[key] = (size, found)
        if size >= limit:
            done.append((last[id(member)], found))
            del open_[key]
    done += [(last[id(found[-1])], found) for _, found in open_.values()]
    return [Bucket(tuple(found)) for _, found in sorted(done, key=lambda entry: entry[0])]


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype
