"""From the gradients of single microbatches on single ranks to the gradient of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from d9d_core.loop.buckets import Buckets, Member
from d9d_core.loop.ownership import Ownership
from d9d_core.protocols import Reducer
from d9d_core.topology.local import local
from d9d_core.topology.mesh import Topology

MIB = 2**20


class Gradients:
    """Owns the gradients of the trained parameters between backward and optimizer.

    What a strategy reduces by itself (FSDP2) is left to it; the rest is summed here, in buckets, while the last
    microbatch's backward runs. A parameter that took no part in a step, on this rank or on any, counts as having a zero
    gradient, so that a step means the same in every layout.

    Args:
        parameters: the trained parameters by name.
        ownership: who reduces what.
        topology: this process among others.
        reducers: what must know when a backward starts.
        bucket_mib: size of a bucket.
        accumulate: the number format in which microbatches add up; the parameters' own by default.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ownership: Ownership,
        topology: Topology,
        reducers: Iterable[Reducer] = (),
        bucket_mib: int = 32,
        accumulate: torch.dtype | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._reducers = tuple(reducers)
        self._open: set[int] = {0}
        narrow = {n: p for n, p in parameters.items() if accumulate is not None and p.dtype != accumulate}
        for parameter in narrow.values():
            parameter.grad_dtype = accumulate
        # FSDP2 adds to the gradient itself, in the parameter's dtype, so these are moved after each microbatch.
        self._folded = {n: p for n, p in narrow.items() if any(o.owner == "fsdp" for o in ownership.owners[n].values())}
        self._sums: dict[str, Tensor] = {}
        self._buckets = Buckets(_members(parameters, ownership, topology), bucket_mib * MIB)

    def before_backward(self, last: bool) -> None:
        """The backward of a microbatch is about to start; ``last``: no other follows in this step."""
        if last:
            self._buckets.arm()
        for reducer in self._reducers:
            reducer.before_backward(last=last, complete=bool(self._folded))

    def after_backward(self) -> None:
        """The backward of a microbatch was issued."""
        for name, parameter in self._folded.items():
            if parameter.grad is None:
                continue
            wide = local(parameter.grad).to(parameter.grad_dtype)
            if name in self._sums:
                self._sums[name] += wide
            else:
                self._sums[name] = wide
            parameter.grad = None

    def reduce(self, stage: int) -> None:
        """All backwards of a stage were issued."""
        self._open.discard(stage)

    def finish(self) -> None:
        """Make all gradients final. Collective over all ranks.

        Raises:
            RuntimeError: the step's program never declared a stage complete.
        """
        if self._open:
            raise RuntimeError(f"the program ended without reducing the gradients of stage(s) {sorted(self._open)}")
        self._buckets.finish()
        for name, parameter in self._parameters.items():
            if name in self._sums:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                local(parameter.grad).copy_(self._sums.pop(name))
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    def reset(self) -> None:
        """Drop all gradients; their memory is reused by the next step."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._open = {0}


def _members(parameters: Mapping[str, nn.Parameter], ownership: Ownership, topology: Topology) -> list[Member]:
    members = []
    for name, parameter in parameters.items():
        axes = ownership.synchronised(name)
        group = topology.axes_group(*axes) if axes else None
        if group is not None:
            operation = ownership.owners[name][axes[0]].operation
            members.append(Member(parameter, group, operation))
    return members
