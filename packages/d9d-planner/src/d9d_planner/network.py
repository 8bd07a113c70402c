"""Times of collectives over mesh axes, by the machines that their ranks are on. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from d9d_core.cost import Operation

from d9d_planner.device import Device


@dataclass(frozen=True, slots=True)
class Group:
    """Group of ranks along neighbouring dimensions of a grid, whose innermost one varies fastest.

    Attributes:
        size: number of ranks.
        stride: distance of two neighbours in the numbering of all ranks.
    """

    size: int
    stride: int = 1

    def on_one_machine(self, node: int) -> int:
        """Ranks of the group on one machine of so many devices."""
        return max(1, min(self.size, node // self.stride))


def seconds(operation: Operation, size: float, group: Group, device: Device) -> float:
    """Time of a collective over the network between machines, or the links within one.

    Ring algorithms: each rank receives what the others have once, for an all-reduce twice. Ranks of a group on one
    machine share what the network brings there; ranks of an all-to-all do not.

    Args:
        operation: which one.
        size: bytes, see :class:`d9d_core.cost.Exchange`.
        group: its ranks.
        device: rates of the links.
    """
    if group.size == 1 or not size:
        return 0.0
    inside = group.on_one_machine(device.node)
    machines = math.ceil(group.size / inside)
    latency = device.link_latency + (machines - 1) * device.network_latency
    if operation == "send":
        crosses = group.stride * group.size > device.node
        return latency + size / (device.network if crosses else device.link)
    if operation == "all_to_all":
        near = size * (inside - 1) / group.size
        far = size * (group.size - inside) / group.size
        return latency + max(near / device.link, far / device.network)
    near = size * (group.size - 1) / group.size
    far = size * (machines - 1) / machines / inside
    once = max(near / device.link, far / device.network)
    return latency + once * (2 if operation == "all_reduce" else 1)
