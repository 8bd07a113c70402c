"""Warning about tensor parallelism across machines, with its cost, before a job starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from d9d_engine.compose.communication.step import StepCollectives
from d9d_engine.distributed.devices import count_devices

MIB = 2**20


def processes_of_node(device: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of processes per machine, from the launcher or the number of local devices; ``None`` if unknown.

    Args:
        device: device type as in the job file.
        environ: environment variables with the launcher's ``LOCAL_WORLD_SIZE``.
    """
    given = environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdigit() and int(given):
        return int(given)
    devices = count_devices(device)
    return devices if devices > 1 else None


def node_warning(tp: int, per_node: int | None, collectives: StepCollectives) -> str | None:
    """Warning that ``tp`` communicates between machines, with the bytes of a step; ``None`` if it does not.

    Ranks are numbered along ``tp`` first, so a tp group is within one machine if its size divides ``per_node``.

    Args:
        tp: size of the axis ``tp``.
        per_node: number of processes per machine; ``None`` if unknown.
        collectives: collectives of a step.
    """
    if per_node is None or tp == 1 or per_node % tp == 0:
        return None
    # Count collectives over tp only: reductions over all ranks cross machines in any case.
    own = [entry.collective for entry in collectives.entries if entry.collective.group == "tp"]
    calls = sum(one.count for one in own)
    unknown = any(one.bytes is None for one in own)
    size = sum((one.bytes or 0) * one.count for one in own)
    bytes_ = "bytes that depend on the data" if unknown else f"{size / MIB:,.1f} MiB ({size:,} bytes)"
    wider = "wider than" if tp > per_node else "no divisor of"
    return (
        f"mesh.tp is {tp}, {wider} the {per_node} processes of a node: {calls} calls with {bytes_} a step and rank "
        "cross the network between nodes, where a link carries about a tenth of the bytes a second, and every "
        f"layer waits for them; use a tp that divides {per_node}, and dp_shard, cp or pp for the rest"
    )
