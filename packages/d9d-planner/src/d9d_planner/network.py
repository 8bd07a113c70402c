"""Times of collectives over mesh axes, depending on the machines of their ranks. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from d9d_core.cost import Operation

from d9d_planner.device import Device


@dataclass(frozen=True, slots=True)
class Group:
    """Group of ranks along adjacent dimensions of a grid, whose innermost dimension varies fastest.

    Attributes:
        size: number of ranks.
        stride: difference between the numbers of neighbouring ranks.
    """

    size: int
    stride: int = 1

    def on_one_machine(self, node: int) -> int:
        """Number of the group's ranks on one machine with ``node`` devices."""
        return max(1, min(self.size, node // self.stride))


def seconds(operation: Operation, size: float, group: Group, device: Device) -> float:
    """Time of a collective, over the network between machines or the links within one.

    Assumes ring algorithms: each rank receives the other ranks' data once, and twice in an all-reduce. Ranks on one
    machine share data received over the network, except in an all-to-all.

    Args:
        operation: kind of collective.
        size: bytes, see :class:`d9d_core.cost.Exchange`.
        group: ranks of the collective.
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
