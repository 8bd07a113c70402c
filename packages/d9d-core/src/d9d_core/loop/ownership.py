"""Who reduces which gradient over which mesh axis: exactly one owner each, settled before anything is allocated.

Placements cannot tell: FSDP2 on a two-dimensional mesh sums over both dimensions although one of them reads
"replicated", and a norm under sequence parallelism looks like any other replicated weight. So strategies say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from d9d_core.errors import BuildError
from d9d_core.protocols import GradientOwner

#: Axes over which ranks see different tokens, so that every gradient is a partial sum over them.
DATA_AXES = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True)
class Ownership:
    """The owner of every reduction.

    Attributes:
        owners: parameter -> axis -> owner; only axes with more than one rank.
    """

    owners: Mapping[str, Mapping[str, GradientOwner]]

    def synchronised(self, parameter: str) -> tuple[str, ...]:
        """The axes over which the synchroniser sums the gradient of a parameter."""
        return tuple(axis for axis, owner in self.owners.get(parameter, {}).items() if owner.owner == "sync")

    def table(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Rows of (axis, "owner, operation", parameters), for people."""
        rows: dict[tuple[str, str], list[str]] = {}
        for name, axes in self.owners.items():
            for axis, owner in axes.items():
                rows.setdefault((axis, f"{owner.owner}, {owner.operation}"), []).append(name)
        return [(axis, what, tuple(names)) for (axis, what), names in rows.items()]


def settle(
    parameters: Iterable[str], sizes: Mapping[str, int], claims: Iterable[tuple[str, Iterable[GradientOwner]]]
) -> Ownership:
    """Give every reduction its owner. What nobody claims over a data axis, the synchroniser sums.

    Args:
        parameters: names of the trained parameters.
        sizes: mesh axis -> size.
        claims: each strategy, by how messages call it, and what it takes responsibility for.

    Raises:
        BuildError: two strategies claim one reduction, or a claim is about something that does not exist.
    """
    owners: dict[str, dict[str, GradientOwner]] = {name: {} for name in parameters}
    claimed: dict[tuple[str, str], str] = {}
    for strategy, entries in claims:
        for entry in entries:
            if entry.axis not in sizes:
                raise BuildError(f"{strategy} reduces '{entry.parameter}' over '{entry.axis}', which is no mesh axis")
            if sizes[entry.axis] == 1 or entry.parameter not in owners:
                continue  # one rank has nothing to reduce; a frozen parameter has no gradient
            key = (entry.parameter, entry.axis)
            if key in claimed:
                raise BuildError(
                    f"the gradient of '{entry.parameter}' would be reduced twice over {entry.axis}: by "
                    f"{claimed[key]} and by {strategy}; remove one of them from 'parallel'"
                )
            claimed[key] = strategy
            owners[entry.parameter][entry.axis] = entry
    for name, axes in owners.items():
        for axis in DATA_AXES:
            if sizes.get(axis, 1) > 1 and axis not in axes:
                axes[axis] = GradientOwner(name, axis, "sync")
    return Ownership(owners)
