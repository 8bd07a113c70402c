"""Detection of deadlocks between the programs of ranks with a limited number of pending sends. Imports no torch."""

from __future__ import annotations

from d9d_core.program.index import ProgramIndex
from d9d_core.schedule import Backward, Forward, InputBackward, ReceiveActivation, ReceiveGradient

__all__ = ["awaited", "find_deadlock"]


def awaited(index: ProgramIndex, buffers: int | None) -> dict[int, tuple[int, ...]]:
    """Dependencies between ranks: number of an action -> numbers of the actions of other ranks that must run before it.

    A computation waits for the other rank's send of its inputs; a send waits for an earlier receive on the other rank,
    which frees a buffer.
    """
    forward, backward, inputs = (index.table(kind) for kind in (Forward, Backward, InputBackward))
    users = dict(zip(index.table(ReceiveActivation), forward, strict=True))
    users |= dict(zip(index.table(ReceiveGradient), map(max, backward, inputs), strict=True))
    found: dict[int, tuple[int, ...]] = {}
    for pairs in index.channels().values():
        for position, (send, receive) in enumerate(pairs):
            user = users[receive]
            found[user] = (*found.get(user, ()), send)
            if buffers is not None and position >= buffers:
                found[send] = (pairs[position - buffers][1],)
    return found


def find_deadlock(index: ProgramIndex, buffers: int | None = 1) -> str | None:
    """Deadlock of the programs: the ranks that wait for one another and their actions; ``None`` if all programs end.

    Args:
        index: index of the programs; each send must have a matching receive.
        buffers: largest number of tensors that one rank may send to another before that rank has posted a receive;
            ``None`` for no limit.
    """
    needs = awaited(index, buffers)
    ranks = len(index.programs)
    current = index.first[:ranks]
    waiting: dict[int, int] = {}  # action that has not run -> rank that waits for it
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        number, end = current[rank], index.first[rank + 1]
        while number < end:
            missing = next((other for other in needs.get(number, ()) if other >= current[index.rank(other)]), None)
            if missing is not None:
                waiting[missing] = rank
                break
            number += 1
            current[rank] = number
            if number - 1 in waiting:
                ready.append(waiting.pop(number - 1))
        current[rank] = number
    stuck = {rank: missing for missing, rank in waiting.items()}
    return _name_cycle(index, current, stuck, buffers) if stuck else None


def _name_cycle(index: ProgramIndex, current: list[int], stuck: dict[int, int], buffers: int | None) -> str:
    path = [min(stuck)]
    while (following := index.rank(stuck[path[-1]])) not in path:
        path.append(following)
    cycle = path[path.index(following) :]
    first = cycle.index(min(cycle))
    parts = []
    for rank in cycle[first:] + cycle[:first]:
        there, missing = index.rank(stuck[rank]), index.action(stuck[rank])
        parts.append(f"rank {rank} at {index.action(current[rank])} waits for {missing} on rank {there}")
    room = "" if buffers is None else f" with room for {buffers} tensor(s) from one rank to another"
    return f"deadlock{room}: {'; '.join(parts)}: move one of these actions before the action at which its rank waits"
