"""Ownership of gradient reductions: one owner for each parameter and mesh axis, determined before allocation.

Placements do not show the owner: FSDP2 on a two-dimensional mesh reduces over both dimensions although one of them is
Replicate, and a norm under sequence parallelism looks like any replicated weight. So strategies declare ownership.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from d9d_core.errors import BuildError
from d9d_core.grid import Grid
from d9d_core.strategy import Applied, GradientOwner
from d9d_core.tensors import is_dtensor
from torch import Tensor

from d9d_engine.distributed.mesh import Topology

#: Axes over which ranks see different tokens, so that every gradient is a partial sum over them.
DATA_AXES = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True)
class Ownership:
    """Owner of the gradient reduction of each parameter along each mesh axis.

    Attributes:
        owners: parameter -> axis (or dimension of its view) -> owner; only axes with several ranks.
        views: parameter -> its view of the mesh, if it has one.
        apart: data axes along which replicas of the model take their own steps.
    """

    owners: Mapping[str, Mapping[str, GradientOwner]]
    views: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    def synchronised(self, parameter: str) -> tuple[str, ...]:
        """Axes over which the engine all-reduces the gradient of a parameter."""
        return tuple(axis for axis, owner in self.owners.get(parameter, {}).items() if owner.owner == "sync")

    def table(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Rows (axis, "owner, operation", parameters) for display."""
        rows: dict[tuple[str, str], list[str]] = {}
        for name, axes in self.owners.items():
            for axis, owner in axes.items():
                what = owner.owner if owner.owner == "none" else f"{owner.owner}, {owner.operation}"
                rows.setdefault((axis, what), []).append(name)
        return [(axis, what, tuple(names)) for (axis, what), names in rows.items()]


def settle(parameters: Iterable[str], topology: Topology, applied: Iterable[tuple[str, Applied]]) -> Ownership:
    """Determine the owners of reductions; the engine sums gradients over data axes that no strategy claims.

    Args:
        parameters: names of the trained parameters.
        topology: sizes of the mesh axes, and views.
        applied: (name of a strategy in messages, effects of the strategy) pairs.

    Raises:
        BuildError: two strategies claim one reduction or place one parameter on different views, or a claim names an
            axis that does not exist.
    """
    outcomes = list(applied)
    views = _views(outcomes)
    sizes = {view: topology.grid(view).sizes for view in set(views.values())}
    owners: dict[str, dict[str, GradientOwner]] = {name: {} for name in parameters}
    claimed: dict[tuple[str, str], str] = {}
    for strategy, outcome in outcomes:
        for entry in outcome.gradients:
            view = views.get(entry.parameter)
            axes = topology.sizes if view is None else sizes[view]
            if view is not None and entry.axis not in axes and entry.axis in _covered(topology, view):
                continue  # a dimension of the view covers this axis, and has its own owner
            if entry.axis not in axes:
                raise BuildError(
                    f"{strategy} reduces '{entry.parameter}' over the unknown axis '{entry.axis}'; name one of "
                    f"{', '.join(axes)}"
                )
            if axes[entry.axis] == 1 or entry.parameter not in owners:
                continue  # a single rank has nothing to reduce; a frozen parameter has no gradient
            key = (entry.parameter, entry.axis)
            if key in claimed:
                raise BuildError(
                    f"the gradient of '{entry.parameter}' would be reduced twice over {entry.axis}: by "
                    f"{claimed[key]} and by {strategy}; remove one of them from 'parallel'"
                )
            claimed[key] = strategy
            owners[entry.parameter][entry.axis] = entry
    for name, owned in owners.items():
        for axis, size in _data_axes(topology, views.get(name)).items():
            if size > 1 and axis not in owned:
                owned[axis] = GradientOwner(name, axis, "sync")
    return Ownership(owners, views)


def check_replicas(
    parameters: Mapping[str, Tensor], ownership: Ownership, topology: Topology, applied: Iterable[tuple[str, Applied]]
) -> Ownership:
    """Find the axes along which replicas diverge.

    If there are any, check that all trained parameters diverge along them, and that replicas can be made equal.

    Args:
        parameters: name -> parameter, after all strategies.
        ownership: owners of the gradient reductions.
        topology: rank, device, meshes and process groups of this process.
        applied: (name of a strategy in messages, effects of the strategy) pairs.

    Returns:
        The ownership, with these axes as ``apart``.

    Raises:
        BuildError: replicas diverge and cannot become equal, or diverge in some trained parameters only; the text names
            the strategy, the axis and a parameter.
    """
    outcomes = list(applied)
    _check_equalisable(parameters, ownership, topology, outcomes)
    sizes = _data_axes(topology, None)
    # Look at all claims, not at this rank's parameters: a pipeline rank may train none, but all ranks must agree.
    apart = {
        entry.axis: strategy
        for strategy, outcome in outcomes
        for entry in outcome.gradients
        if entry.owner == "none" and sizes.get(entry.axis, 1) > 1 and entry.parameter in parameters
        if ownership.owners.get(entry.parameter, {}).get(entry.axis, entry) is entry
        if entry.parameter not in ownership.views and not _is_sharded(parameters[entry.parameter], entry.axis)
    }
    for name, owned in ownership.owners.items():
        for axis, strategy in apart.items():
            if name in ownership.views or axis not in owned or owned[axis].owner != "none":
                raise BuildError(
                    f"{strategy} lets replicas take their own steps over {axis}, but the gradient of '{name}' is "
                    f"reduced over {axis} or a view of it; remove the strategy that shards or reduces this parameter, "
                    f"such as expert_parallel, or set mesh.{axis} to 1"
                )
    return replace(ownership, apart=tuple(axis for axis in DATA_AXES if axis in apart))


def _check_equalisable(
    parameters: Mapping[str, Tensor], ownership: Ownership, topology: Topology, applied: Iterable[tuple[str, Applied]]
) -> None:
    for strategy, outcome in applied:
        if outcome.resynchronise is not None or outcome.meetings is not None:
            continue
        for entry in outcome.gradients:
            owned = ownership.owners.get(entry.parameter, {}).get(entry.axis)
            if owned is not entry or entry.owner != "none":
                continue
            axes = _data_axes(topology, ownership.views.get(entry.parameter))
            if axes.get(entry.axis, 1) > 1 and not _is_sharded(parameters[entry.parameter], entry.axis):
                raise BuildError(
                    f"{strategy} leaves the gradient of '{entry.parameter}' unreduced over {entry.axis}, so that its "
                    f"{axes[entry.axis]} replicas diverge, and a checkpoint would keep only one of them; the strategy "
                    "must declare Applied.meetings or Applied.resynchronise, which make them equal"
                )


def _is_sharded(parameter: Tensor, axis: str) -> bool:
    """Whether ranks along an axis hold different shards of a parameter."""
    if not is_dtensor(parameter):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in names and not parameter.placements[names.index(axis)].is_replicate()


def _views(outcomes: Iterable[tuple[str, Applied]]) -> dict[str, str]:
    views: dict[str, str] = {}
    for strategy, outcome in outcomes:
        for name, view in outcome.views.items():
            if views.setdefault(name, view) != view:
                raise BuildError(
                    f"{strategy} places '{name}' on the view '{view}', another strategy on '{views[name]}'; "
                    "remove one of them from 'parallel'"
                )
    return views


def _covered(topology: Topology, view: str) -> set[str]:
    """Base axes that a view's dimensions cover."""
    return {axis for dim in topology.views[view].dims for axis in dim.axes}


def _data_axes(topology: Topology, view: str | None) -> Mapping[str, int]:
    """Axes, or dimensions of a view, along which ranks have different tokens, with their sizes."""
    if view is None:
        return {axis: topology.sizes.get(axis, 1) for axis in DATA_AXES}
    dims, sizes = topology.views[view].dims, Grid.of_view(topology.views[view], topology.sizes).sizes
    return {dim.name: sizes[dim.name] for dim in dims if set(dim.axes) & set(DATA_AXES)}
