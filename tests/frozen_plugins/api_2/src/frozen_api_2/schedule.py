"""Pipeline schedule; imports no torch."""

from collections.abc import Iterator, Sequence

from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    Schedule,
    SendActivation,
    SendGradient,
)

from frozen_api_2.config import AllForwardConfig


def build(config: AllForwardConfig) -> Schedule:
    return programs


def programs(ranks: int, microbatches: int) -> Sequence[Program]:
    if ranks < 1 or microbatches < 1:
        raise ValueError("give 1 or more ranks and microbatches")
    return [tuple(program(rank, ranks, microbatches)) for rank in range(ranks)]


def program(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    for number in range(microbatches):
        if rank > 0:
            yield ReceiveActivation(rank, number)
        yield Forward(rank, number)
        if rank < ranks - 1:
            yield SendActivation(rank, number)
    for number in range(microbatches):
        if rank < ranks - 1:
            yield ReceiveGradient(rank, number)
        yield Backward(rank, number)
        if rank > 0:
            yield SendGradient(rank, number)
    yield Reduce(rank)
