"""Gradients of a step: accumulation over microbatches and reduction over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Reducer
from d9d_core.tensors import local
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.buckets import Buckets, Member
from d9d_engine.step.ownership import Ownership
from d9d_engine.step.tied import Ties

MIB = 2**20


class Gradients:
    """Gradients of the trained parameters between backward and optimizer.

    Gradients that a strategy reduces itself (FSDP2) are left to the strategy. All other gradients are all-reduced here
    in buckets: during the last microbatch's backward, or after it if a strategy communicates during the backward. A
    parameter without a gradient in a step, on some or all ranks, gets a zero gradient, so that a step has the same
    result in every layout.

    Args:
        parameters: name -> trained parameter.
        ownership: owners of the reductions.
        topology: rank, device, meshes and process groups of this process.
        reducers: stage -> reducers to notify when a backward of the stage starts.
        ties: tied parameters of several stages.
        bucket_mib: size of a bucket in MiB.
        accumulate: dtype in which gradients are accumulated; by default the parameter's dtype.

    Raises:
        BuildError: one gradient would be reduced by several operations.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ownership: Ownership,
        topology: Topology,
        reducers: Mapping[int, Iterable[Reducer]] | None = None,
        bucket_mib: int = 32,
        accumulate: torch.dtype | None = None,
        ties: Ties | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._device = topology.device
        self._reducers = {stage: tuple(of_stage) for stage, of_stage in (reducers or {0: ()}).items()}
        self._ties = ties or Ties()
        self._open = set(self._reducers)
        self._split: set[int] = set()
        for parameter in parameters.values():
            if accumulate is not None and parameter.dtype != accumulate:
                parameter.grad_dtype = accumulate  # the dtype in which autograd and FSDP2 accumulate
        members = _members(parameters, ownership, topology)
        alone = len(self._reducers) == 1 and not any(self._reducers.values())
        self._buckets = Buckets(members, bucket_mib * MIB, overlap=alone)

    def before_backward(self, last: bool, stage: int = 0, complete: bool = True) -> None:
        """Prepare for a backward of a stage that is about to start.

        Args:
            last: whether this is the last backward of the stage in this step.
            stage: index of the stage.
            complete: whether the backward computes all gradients; if not, :meth:`after_weights` follows.
        """
        if last:
            self._buckets.arm()
        if not complete:
            self._split.add(stage)
        for reducer in self._reducers[stage]:
            reducer.before_backward(last=last, complete=complete)

    def after_weights(self, stage: int) -> None:
        """Tell a stage's gradient reducers that a microbatch's deferred weight gradients are computed."""
        for reducer in self._reducers[stage]:
            reducer.after_weights()

    def reduce(self, stage: int) -> None:
        """Note that the gradients of a stage are complete, and let strategies reduce them if its backwards were split.

        Without split backwards, strategies have reduced the gradients in the last backward. Collective over the ranks
        that share the stage's parameters.
        """
        self._open.discard(stage)
        if stage in self._split:
            for reducer in self._reducers[stage]:
                reducer.reduce()

    def finish(self) -> None:
        """Make all gradients final. Collective over all ranks.

        Raises:
            RuntimeError: the step's program has no :class:`~d9d_core.schedule.Reduce` for a stage.
        """
        if self._open:
            raise RuntimeError(
                f"the schedule's program has no Reduce for the stage(s) {sorted(self._open)}; add one for each stage"
            )
        self._ties.gather()
        self._buckets.finish()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        self._ties.reduce()

    def reductions(self) -> list[tuple[str, dist.ProcessGroup, int]]:
        """All-reduces of a step: purpose, process group and bytes of each."""
        buckets = [("gradients in a bucket", group, size) for group, size in self._buckets.sizes()]
        return buckets + [("gradient of a tied parameter", group, size) for group, size in self._ties.sizes()]

    def final(self) -> list[Tensor]:
        """Local gradients of all trained parameters, in order, not copied; call it after :meth:`finish`."""
        return [local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]

    @property
    def device(self) -> torch.device:
        return self._device

    def scale(self, factor: Tensor) -> None:
        """Multiply all final gradients by a 0-d tensor on the device."""
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradient.mul_(factor.to(gradient.device, non_blocking=True))

    def reset(self) -> None:
        """Set all gradients to ``None``, like ``zero_grad``, so that their memory can be reused."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._ties.reset()
        self._open, self._split = set(self._reducers), set()


def _members(parameters: Mapping[str, nn.Parameter], ownership: Ownership, topology: Topology) -> list[Member]:
    members = []
    synchronised = {name: ownership.synchronised(name) for name in parameters}
    for name, axes in synchronised.items():
        operations = {axis: ownership.owners[name][axis].operation for axis in axes}
        if len(set(operations.values())) > 1:
            parts = " and ".join(f"by {operation} over {axis}" for axis, operation in operations.items())
            raise BuildError(
                f"strategies leave two different reductions of the gradient of '{name}' to the trainer: {parts}; one "
                "of "
                "the strategies must do its reduction itself"
            )
        view = ownership.views.get(name)
        group = None
        if axes:
            group = topology.axes_group(*axes) if view is None else topology.group(view, *axes)
        if group is not None:
            members.append(Member(parameters[name], group, operations[axes[0]]))
    return members
