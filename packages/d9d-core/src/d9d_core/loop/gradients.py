"""From the gradients of single microbatches on single ranks to the gradient of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from d9d_core.errors import BuildError
from d9d_core.loop.buckets import Buckets, Member
from d9d_core.loop.ownership import Ownership
from d9d_core.protocols import Reducer
from d9d_core.topology.mesh import Topology

MIB = 2**20


class Gradients:
    """Owns the gradients of the trained parameters between backward and optimizer.

    What a strategy reduces by itself (FSDP2) is left to it; the rest is summed here, in buckets: while the last
    microbatch's backward runs, or after it if a strategy reduces meanwhile. A parameter that took no part in a step, on
    this rank or on any, counts as having a zero gradient, so that a step means the same in every layout.

    Args:
        parameters: the trained parameters by name.
        ownership: who reduces what.
        topology: this process among others.
        reducers: what must know when a backward starts.
        bucket_mib: size of a bucket.
        accumulate: the number format in which microbatches add up; the parameters' own by default.

    Raises:
        BuildError: one gradient is to be reduced by several operations.
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
        for parameter in parameters.values():
            if accumulate is not None and parameter.dtype != accumulate:
                parameter.grad_dtype = accumulate  # autograd and FSDP2 add up in it
        members = _members(parameters, ownership, topology)
        self._buckets = Buckets(members, bucket_mib * MIB, overlap=not self._reducers)

    def before_backward(self, last: bool) -> None:
        """The backward of a microbatch is about to start; ``last``: no other follows in this step."""
        if last:
            self._buckets.arm()
        for reducer in self._reducers:
            reducer.before_backward(last=last)

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
        for parameter in self._parameters.values():
            if parameter.grad is None:
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
        operations = {axis: ownership.owners[name][axis].operation for axis in axes}
        if len(set(operations.values())) > 1:
            parts = " and ".join(f"by {operation} over {axis}" for axis, operation in operations.items())
            raise BuildError(
                f"the gradient of '{name}' would be reduced {parts} at once; the strategy that owns one of them must "
                "reduce it itself"
            )
        view = ownership.views.get(name)
        group = None
        if axes:
            group = topology.axes_group(*axes) if view is None else topology.group(view, *axes)
        if group is not None:
            members.append(Member(parameter, group, operations[axes[0]]))
    return members
