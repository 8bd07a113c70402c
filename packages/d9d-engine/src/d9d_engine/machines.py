"""Checks of a mesh against the machines that share a job. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from d9d_core.errors import D9dError, JobError


def require_whole_groups(tp: int, nodes: int, processes: int) -> None:
    """Check that each group of tensor-parallel ranks is within one machine, or on several whole machines.

    Ranks are numbered along ``tp`` first and machine by machine, so a group is within one machine, or on several whole
    machines, only if one of the two numbers divides the other.

    Args:
        tp: size of the mesh axis ``tp``.
        nodes: number of machines.
        processes: number of processes on each machine.

    Raises:
        JobError: a group would span machines of which it uses only a part.
    """
    if nodes == 1 or processes % tp == 0 or tp % processes == 0:
        return
    fitting = [size for size in range(1, processes + 1) if processes % size == 0]
    raise JobError(
        f"mesh.tp is {tp}, but each of the {nodes} machines has {processes} processes, so machines would share groups "
        f"of tp unevenly; use a tp that divides {processes} ({', '.join(map(str, fitting))}), or start a multiple of "
        f"{tp} processes on each machine"
    )


@contextmanager
def sizes_named(needed: int, nodes: int, processes: int, option: str) -> Iterator[None]:
    """Extend an error about the number of processes by the options that start as many processes as the mesh needs.

    Args:
        needed: number of processes that the mesh needs.
        nodes: number of machines.
        processes: number of processes on each machine.
        option: option of the command line for ``processes``.
    """
    try:
        yield
    except D9dError as error:
        if nodes > 1 and needed != nodes * processes:
            counts = [count for count in range(1, min(needed, 2 * nodes) + 1) if needed % count == 0]
            fits = f"{option} {needed // nodes}" if needed % nodes == 0 else f"--nodes {' or '.join(map(str, counts))}"
            error.add_note(f"{nodes} machines with {processes} processes each are {nodes * processes}; give {fits}")
        raise
