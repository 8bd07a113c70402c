"""All-reduce of gradients in flat buckets, while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from d9d_core.tensors import local
from torch import Tensor, nn
from torch import distributed as dist

#: Part of a bucket from which on a gradient is reduced alone: a call costs less than copies there and back.
_ALONE = 8
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Member:
    """Parameter whose gradient is in a bucket.

    Attributes:
        parameter: it.
        group: over which processes.
        operation: ``sum`` or ``max``.
    """

    parameter: nn.Parameter
    group: dist.ProcessGroup
    operation: str


@dataclass
class Bucket:
    """Bucket of gradients that are all-reduced together: one group, one operation, one dtype, one device."""

    members: Sequence[Member]
    missing: int = 0
    _flat: Tensor | None = None
    _work: dist.Work | None = field(default=None, repr=False)

    def launch(self) -> None:
        """Start the all-reduce; a gradient that does not exist counts as zeros. Collective over the bucket's group.

        A gradient that is alone is reduced where it is.
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
        """Make the gradients final; the device waits, the host does not (on CPU they are the same)."""
        assert self._flat is not None
        if self._work is not None:
            self._work.wait()
        targets = [local(member.parameter.grad) for member in self.members if member.parameter.grad is not None]
        if self._flat.data_ptr() != targets[0].data_ptr():
            parts = torch.split(self._flat, [target.numel() for target in targets])
            torch._foreach_copy_(targets, [p.view_as(t) for p, t in zip(parts, targets, strict=True)])
        self._flat = self._work = None


class Buckets:
    """Buckets that are launched as their gradients appear, always in the same order on every rank.

    Gradients appear from the last layer to the first, so buckets are filled in reverse order of registration. A bucket
    is launched when it and all before it are full: ranks on which some parameter has no gradient launch the rest at the
    end, in the same order, so collectives always meet their counterparts.

    Args:
        members: in order of registration.
        limit: bytes of a bucket; a gradient of at least an eighth of them gets one of its own, which needs no copies.
        overlap: launch during the backward. Only if nothing else reduces over the same ranks meanwhile: a rank without
            some gradient launches later than the others, so they would disagree about which reduction comes first.
    """

    def __init__(self, members: Iterable[Member], limit: int, overlap: bool = True) -> None:
        self._buckets = _fill(list(members)[::-1], limit)
        self._armed = False
        self._next = 0
        for index, bucket in enumerate(self._buckets if overlap else ()):
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(self._arrival(index))  # type: ignore[no-untyped-call]

    def sizes(self) -> list[tuple[dist.ProcessGroup, int]]:
        """Process group and bytes of each bucket: one all-reduce in a step."""
        return [
            (
                bucket.members[0].group,
                sum(local(m.parameter).numel() * _grad_dtype(m.parameter).itemsize for m in bucket.members),
            )
            for bucket in self._buckets
        ]

    def arm(self) -> None:
        """Get ready for the last backward of the step: gradients that appear are final on this rank."""
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def finish(self) -> None:
        """Launch what is left, and make all gradients final."""
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
    """Fill buckets per kind; they are ordered by when they become full."""
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
