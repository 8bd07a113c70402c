"""Collectives of FSDP2's units in a step: all-gathers of parameters, and reductions of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from d9d_core.strategy import Collective, Pass, StepShape
from d9d_core.topology import Topology
from torch import nn


@dataclass(frozen=True)
class Unit:
    """Unit of FSDP2: parameters that are gathered and reduced together.

    Attributes:
        name: qualified name of its module.
        parameters: parameters of the unit by name, with their shape on this rank before sharding.
        view: view of the mesh that the unit is sharded over.
        dims: dimensions of the view: shards, or replicas and shards.
        reshards: whether its gathered parameters are freed after the forward; a number means that they are, and that
            the backward gathers them from that many ranks only.
        prefetches: whether the job, not FSDP2, sets which units the unit's backward prefetches.
        even: whether parameters are sharded evenly, in any dimension; otherwise dimension 0 is padded.
    """

    name: str
    parameters: Mapping[str, torch.Size]
    view: str
    dims: tuple[str, ...]
    reshards: bool | int
    prefetches: bool = False
    even: bool = False


@dataclass(frozen=True)
class FsdpCommunication:
    """Communication (:class:`d9d_core.strategy.Communication`) of data parallelism with units of FSDP2.

    Attributes:
        stage: stage with all units.
        topology: topology of this rank.
        units: units with parameters, in the order in which their forwards end.
        defer: reductions deferred to the last microbatch.
        param_dtype: dtype of gathered parameters, if it differs from the dtype of the parameters.
        reduce_dtype: dtype of reductions, if it differs from the dtype of the gradients.
        together: units of all data-parallel entries of the job in this stage, which prefetch each other, in the same
            order; by default ``units``.
    """

    stage: nn.Module
    topology: Topology
    units: Sequence[Unit]
    defer: Literal["nothing", "all_reduce", "everything"]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    together: Sequence[Unit] = ()

    def __call__(self, step: StepShape) -> Iterator[Collective]:
        """List the all-gathers, reduce-scatters and all-reduces of all units."""
        together, own = self.together or self.units, {unit.name for unit in self.units}
        for unit, (forward, backward) in zip(together, times_gathered(step.passes, together), strict=True):
            if unit.name in own:
                yield from self._gathers(unit, forward, backward)
                yield from self._reductions(unit, step)

    def _gathers(self, unit: Unit, forward: int, backward: int) -> Iterator[Collective]:
        shards, what = self._ranks(unit, unit.dims[-1]), f"parameters of {unit.name or 'the rest'}"
        if len(shards) == 1:
            return
        size = self._bytes(unit, len(shards), gradients=False)
        if forward:
            yield Collective("all_gather", unit.dims[-1], shards, size, forward, f"{what}, forward")
        if not backward:
            return
        if unit.reshards is True or not unit.reshards:
            yield Collective("all_gather", unit.dims[-1], shards, size, backward, f"{what}, backward")
        elif unit.reshards > 1:
            first = shards.index(self.topology.rank) // unit.reshards * unit.reshards
            near = shards[first : first + unit.reshards]
            group = f"{unit.reshards} ranks of {unit.dims[-1]}"
            # Shards may be padded, so the actual size may be slightly larger.
            yield Collective("all_gather", group, near, size, backward, f"{what}, backward", approximate=True)

    def _reductions(self, unit: Unit, step: StepShape) -> Iterator[Collective]:
        if not any(self.stage.get_parameter(name).requires_grad for name in unit.parameters):
            return
        shards, what = self._ranks(unit, unit.dims[-1]), f"gradients of {unit.name or 'the rest'}"
        late = step.split_backward or self.defer == "everything"
        size = self._bytes(unit, len(shards), gradients=True)
        if len(shards) > 1:
            count = 1 if late else step.backwards
            yield Collective("reduce_scatter", unit.dims[-1], shards, size, count, what)
        if len(unit.dims) > 1 and len(replicas := self._ranks(unit, unit.dims[0])) > 1:
            count = 1 if late or self.defer == "all_reduce" else step.backwards
            yield Collective("all_reduce", unit.dims[0], replicas, size // len(shards), count, what)

    def _ranks(self, unit: Unit, dim: str) -> tuple[int, ...]:
        return self.topology.grid(unit.view).group(self.topology.rank, [dim])

    def _bytes(self, unit: Unit, shards: int, *, gradients: bool) -> int:
        total = 0
        for name, shape in unit.parameters.items():
            parameter = self.stage.get_parameter(name)
            if gradients and not parameter.requires_grad:
                continue
            rows = shape[0] if unit.even else -(-shape[0] // shards) * shards
            dtype = self.param_dtype or parameter.dtype
            if gradients:
                dtype = self.reduce_dtype or parameter.grad_dtype or parameter.dtype
            total += rows * shape[1:].numel() * dtype.itemsize
        return total


class _State:
    """State of a unit in the simulation of a step.

    Attributes:
        whole: whether the unit's parameters are gathered.
        forward, backward: numbers of all-gathers in forwards and in backwards so far.
        indices: indices, among all forwards of the step, of this unit's forwards whose backward has not run yet.
    """

    def __init__(self) -> None:
        self.whole = False
        self.forward = self.backward = 0
        self.indices: list[int] = []


def times_gathered(passes: Sequence[Pass], units: Sequence[Unit]) -> list[tuple[int, int]]:
    """Numbers of all-gathers of each unit's parameters in the forwards and in the backwards of a step.

    Parameters are freed after each backward, and after each forward if the unit ``reshards``; otherwise the next pass
    finds them gathered. In addition, the backward of a unit prefetches the unit whose forward came before it. FSDP2
    records forwards until the last backward. With several microbatches, the first unit therefore prefetches the last
    unit of an earlier forward. If this last unit is the stage's own unit, which is still gathered, there is no
    additional all-gather; if all parameters are in blocks, there is one.

    Args:
        passes: passes of the stage, in order.
        units: units in the order in which their forwards end.
    """
    states, order = [_State() for _ in units], list[_State]()
    for one in passes:
        if one == "forward":
            for unit, state in zip(units, states, strict=True):
                state.forward += not state.whole
                state.whole = not unit.reshards
                state.indices.append(len(order))
                order.append(state)
            continue
        for unit, state in zip(reversed(units), reversed(states), strict=True):
            state.backward += not state.whole
            state.whole = True
            if not unit.prefetches and state.indices and (index := state.indices.pop()):
                before = order[index - 1]
                before.backward += not before.whole
                before.whole = True
            state.whole = not unit.name  # the stage's own parameters are freed last
        for unit, state in zip(units, states, strict=True):
            state.whole = state.whole and bool(unit.name)
    return [(state.forward, state.backward) for state in states]
