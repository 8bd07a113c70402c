"""Validation of the programs of all ranks before a step runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from d9d_core.program.deadlock import find_deadlock
from d9d_core.program.index import ProgramIndex
from d9d_core.schedule import (
    Backward,
    Forward,
    InputBackward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    WeightBackward,
    count_stages,
)

__all__ = ["placement", "problems_of", "validate"]

_GRADIENTS = (Backward, InputBackward, WeightBackward)


def validate(
    programs: Sequence[Program],
    stages: int,
    microbatches: int,
    *,
    training: bool = True,
    buffers: int | None = 1,
) -> list[str]:
    """Validate the programs of all ranks together, deadlocks included. Returns the problems.

    On one rank, every stage runs each microbatch forward once and backward once (in one action, or as input gradients
    and then weight gradients) after the actions it depends on, and reduces once, after its last gradients. Tensors that
    cross ranks are sent once and received once, in the same order on both sides, without deadlock.

    Args:
        programs: programs of all ranks.
        stages: number of stages of the model.
        microbatches: number of microbatches.
        training: whether there are backwards and reductions.
        buffers: largest number of tensors that one rank may send to another before that rank has posted a receive;
            further sends wait. ``None`` is no limit.
    """
    index = ProgramIndex.of(programs, stages, microbatches)
    problems = problems_of(index, training)
    if not problems and (deadlock := find_deadlock(index, buffers)):
        problems = [deadlock]
    return problems


def problems_of(index: ProgramIndex, training: bool = True) -> list[str]:
    """Problems of the programs other than deadlocks."""
    problems = index.problems
    for check in (_check_presence, _check_transfers, _check_order, _check_channels):
        # Consequences of a problem would hide it, so later checks run only if earlier ones pass.
        problems = problems or list(check(index, training))
    return problems


def placement(programs: Sequence[Program]) -> list[tuple[int, ...]]:
    """Stages of each rank, in ascending order."""
    hosts = ProgramIndex.of(programs, count_stages(programs)).hosts
    return [tuple(stage for stage, host in enumerate(hosts) if host == rank) for rank in range(len(programs))]


def _check_presence(index: ProgramIndex, training: bool) -> Iterator[str]:
    """Yield errors for missing forwards and, in training, for missing or doubled backwards and missing reductions.

    Without training, backwards and reductions are errors. :class:`ProgramIndex` reports repeated actions.
    """
    size = index.microbatches
    forward, backward, inputs, weights = (index.table(kind) for kind in (Forward, *_GRADIENTS))
    for stage in range(index.stages):
        span = range(stage * size, (stage + 1) * size)
        where = f"on rank {index.hosts[stage]}" if index.hosts[stage] >= 0 else "on every rank"
        missing = [f"F{stage}.{at - span.start}" for at in span if forward[at] < 0]
        for at in span:
            unsplit, split = backward[at] >= 0, (inputs[at] >= 0, weights[at] >= 0)
            text = f"{stage}.{at - span.start}"
            if not training and (unsplit or any(split)):
                yield f"there is a backward of {text} {where}, but the program has no training; remove it"
            elif training and unsplit and any(split):
                yield f"B{text} {where} computes all gradients, but I{text} or W{text} is there too; remove one"
            elif training and not unsplit:
                missing += (
                    [f"{mark}{text}" for mark, there in zip("IW", split, strict=True) if not there]
                    if any(split)
                    else [f"B{text}"]
                )
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            names = "; ".join(f"{name} missing" for name in missing[:4])
            yield f"{names}{more} {where}: a stage computes each microbatch once"
        if training and index.reduces[stage] < 0:
            yield f"R{stage} is missing {where}: add it after the last gradients of stage {stage}"
        elif not training and index.reduces[stage] >= 0:
            yield f"R{stage} {where} reduces gradients, but the program has no training; remove it"


def _check_transfers(index: ProgramIndex, training: bool) -> Iterator[str]:
    """Check that tensors which cross ranks have one send and one receive, and other tensors have none."""
    size, hosts = index.microbatches, index.hosts
    for kind, step, of_training in (
        (SendActivation, 1, False),
        (ReceiveActivation, -1, False),
        (SendGradient, -1, True),
        (ReceiveGradient, 1, True),
    ):
        numbers = index.table(kind)
        for stage in range(index.stages):
            peer = stage + step
            inside = 0 <= peer < index.stages
            needed = inside and hosts[peer] != hosts[stage] and (training or not of_training)
            for at in range(stage * size, (stage + 1) * size):
                if (numbers[at] >= 0) == needed:
                    continue
                name = f"{kind.mark}{stage}.{at % size}"
                if needed:
                    how = "sends" if kind in (SendActivation, SendGradient) else "receives"
                    other = f"stage {peer} is on rank {hosts[peer]}"
                    yield f"{name} is missing on rank {hosts[stage]}: {other}, so rank {hosts[stage]} {how} it"
                elif not training and inside and of_training:
                    yield f"{name} on rank {hosts[stage]}: there are no gradients without training; remove it"
                else:
                    why = f"stage {peer} is on the same rank" if inside else f"there is no stage {peer}"
                    yield f"{name} on rank {hosts[stage]}: {why}; remove it"


def _check_order(index: ProgramIndex, training: bool) -> Iterator[str]:  # noqa: ARG001 - one signature for all
    """Check that every action comes after the actions of its rank that it depends on."""
    size, hosts = index.microbatches, index.hosts
    forward, weights = index.table(Forward), index.table(WeightBackward)
    # A backward is either whole or split, so one of its two numbers is -1, which means absent.
    backward = list(map(max, index.table(Backward), index.table(InputBackward)))
    pairs = [
        (forward, index.table(ReceiveActivation)),
        (index.table(SendActivation), forward),
        (backward, forward),
        (backward, index.table(ReceiveGradient)),
        (index.table(SendGradient), backward),
        (weights, backward),
    ]
    for stage in range(index.stages - 1):
        if hosts[stage] == hosts[stage + 1]:
            here, above = (slice(at * size, (at + 1) * size) for at in (stage, stage + 1))
            pairs += [(forward[above], forward[here]), (backward[here], backward[above])]
    for stage, reduce in enumerate(index.reduces):
        here = slice(stage * size, (stage + 1) * size)
        pairs.append(([reduce], [max(*backward[here], *weights[here], -1)]))
    for effects, causes in pairs:
        for effect, cause in zip(effects, causes, strict=True):
            if 0 <= effect <= cause:
                yield _late(index, effect, cause)


def _late(index: ProgramIndex, early: int, cause: int) -> str:
    action, needed, rank = index.action(early), index.action(cause), index.rank(early)
    if early == cause:
        return f"{action} on rank {rank} overlaps two computations of which one needs the other; take other pairs"
    return f"{action} comes before {needed} on rank {rank}, but depends on it; move it after {needed}"


def _check_channels(index: ProgramIndex, training: bool) -> Iterator[str]:  # noqa: ARG001 - one signature for all
    """Check that sends and receives between two ranks have the same order on both ranks."""
    for (source, target), pairs in index.channels().items():
        for before, after in pairwise(pairs):
            if before[1] > after[1]:
                first, second = (index.action(send) for send, _ in (before, after))
                taken, waiting = (index.action(receive) for _, receive in (after, before))
                yield (
                    f"rank {source} sends {first} before {second}, but rank {target} receives {taken} before "
                    f"{waiting}; tensors from one rank to another arrive in the order of sending: swap the receives"
                )
                break
