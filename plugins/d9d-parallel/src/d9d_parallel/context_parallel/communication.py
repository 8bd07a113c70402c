"""Collectives of context parallelism in a step: of each attention core, and of other modules that mix positions.

Numbers of elements are per position of one rank. On R ranks, a rank has S / R of the S positions of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from d9d_core.strategy import Collective, CommunicatesInContext, Kind, StepShape
from torch import nn

from d9d_parallel.context_parallel.share import ContextPositions
from d9d_parallel.ranks import Ranks

#: Bytes per element of the gradients that a ring sums, at least; more if the model computes in a wider dtype.
_WIDE = 4


@dataclass(frozen=True)
class Meeting:
    """Process groups of the exchanges in attention.

    Attributes:
        tp: number of ranks of ``tp``, which have different heads.
        heads: ranks that exchange positions for heads (methods ``ulysses`` and ``hybrid``); ``None`` for none.
        ring: ranks that pass keys and values around (``ring`` and ``hybrid``); ``None`` for none. In ``hybrid``, the
            ranks of a ring have the same heads, and their positions are in zigzag order, in fewer and longer chunks.
        keys: positions of this rank, whose keys and values are gathered (method ``all_gather``); ``None`` for none.
    """

    tp: int
    heads: Ranks | None = None
    ring: Ranks | None = None
    keys: ContextPositions | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of an attention core on one rank of ``tp``.

    Attributes:
        query: number of query heads.
        key_value: number of key/value heads.
        features: number of features of a head.
        latent: number of elements of a position's latent vector, if keys and values are computed from latent vectors;
            else ``None``.
    """

    query: int
    key_value: int
    features: int
    latent: int | None = None


class _Call(NamedTuple):
    """Collective that an attention core calls in each forward, or in each backward.

    Attributes:
        kind: operation.
        ranks: ranks of the collective, in order.
        numbers: number of elements per position of this rank, counted as in :class:`d9d_core.strategy.Collective`;
            ``None`` if the core does not declare its heads.
        what: name of the exchanged tensors.
        backward: whether it is part of the backward; otherwise of the forward.
        times: number of calls in one pass.
        is_wide: whether elements are sent in float32, or in the model's format if it is wider.
    """

    kind: Kind
    ranks: tuple[int, ...]
    numbers: int | None
    what: str
    backward: bool = False
    times: int = 1
    is_wide: bool = False


@dataclass
class ContextCommunication:
    """Communication (:class:`d9d_core.strategy.Communication`) of context parallelism: positions are split over ``cp``.

    Attributes:
        stage: stage with the attention cores.
        ranks: all ranks of ``cp``.
        meeting: process groups of the exchanges in attention.
        cores: attention cores by qualified name, with their heads; ``None`` if a core does not declare them.
        alone: modules that communicate themselves, by qualified name.
    """

    stage: nn.Module
    ranks: Ranks
    meeting: Meeting
    cores: dict[str, Heads | None] = field(default_factory=dict)
    alone: dict[str, CommunicatesInContext] = field(default_factory=dict)

    def __call__(self, step: StepShape) -> Iterator[Collective]:
        """List the collectives of all cores and modules; with frozen layers, some of the backward may be skipped."""
        frozen = any(not parameter.requires_grad for parameter in self.stage.parameters())
        for name, heads in self.cores.items():
            for call in self._of_core(heads):
                itemsize = max(step.itemsize, _WIDE) if call.is_wide else step.itemsize
                yield Collective(
                    call.kind,
                    "cp" if len(call.ranks) == self.ranks.size else f"{len(call.ranks)} ranks of cp",
                    call.ranks,
                    None if call.numbers is None else step.bytes_of(call.numbers, itemsize),
                    call.times * (step.backwards if call.backward else step.forwards),
                    f"{call.what} at {name}, {'backward' if call.backward else 'forward'}",
                    None if call.backward else name,
                    step.approximate,
                    at_most=call.backward and frozen,
                )
        for name, module in self.alone.items():
            for one in module.context_collectives(step):
                yield Collective(
                    one.kind,
                    "cp",
                    self.ranks.numbers,
                    one.bytes,
                    step.backwards if one.backward else step.forwards,
                    f"{one.what} at {name}, {'backward' if one.backward else 'forward'}",
                    None if one.backward else name,
                    step.approximate,
                    at_most=one.at_most or (one.backward and frozen),
                )

    def _of_core(self, heads: Heads | None) -> Iterator[_Call]:
        swapping, ring, keys = self.meeting.heads, self.meeting.ring, self.meeting.keys
        if keys is not None:
            ranks = keys.all_ranks
            size, what = None, "keys and values"
            if heads is not None and heads.latent is not None:
                size, what = heads.latent * ranks.size, "latents"
            elif heads is not None:
                size = 2 * heads.key_value * heads.features * ranks.size
            yield _Call("all_gather", ranks.numbers, size, what)
            yield _Call("reduce_scatter", ranks.numbers, size, f"gradients of {what}", backward=True)
        if swapping is not None:
            yield from _swaps(heads, swapping)
        if ring is not None:
            # After the exchange, ranks have fewer heads of more positions.
            size = None if heads is None else 2 * _key_value_heads(heads, swapping) * heads.features
            yield from _turns(size, ring)


def _swaps(heads: Heads | None, ranks: Ranks) -> Iterator[_Call]:
    """All-to-alls of ``ulysses``: from split positions to split heads before attention, and back after it."""
    there = back = None
    if heads is not None:
        back = heads.query * heads.features
        there = back + 2 * _key_value_heads(heads, ranks) * heads.features
    yield _Call("all_to_all", ranks.numbers, there, "queries, keys and values")
    yield _Call("all_to_all", ranks.numbers, back, "outputs")
    yield _Call("all_to_all", ranks.numbers, back, "gradients of outputs", backward=True)
    yield _Call("all_to_all", ranks.numbers, there, "gradients of queries, keys and values", backward=True)


def _turns(numbers: int | None, ring: Ranks) -> Iterator[_Call]:
    """Sends and receives of a ring of R ranks: R - 1 of keys and values, R of gradients, which end on their rank."""
    here, following, previous = (ring.numbers[(ring.rank + turn) % ring.size] for turn in (0, 1, -1))
    ways: Mapping[Kind, tuple[int, ...]] = {
        "send": tuple(sorted((here, following))),
        "receive": tuple(sorted((here, previous))),
    }
    for kind, ranks in ways.items():
        yield _Call(kind, ranks, numbers, "keys and values", times=ring.size - 1)
    for kind, ranks in ways.items():
        yield _Call(kind, ranks, numbers, "keys and values", backward=True, times=ring.size - 1)
        yield _Call(kind, ranks, numbers, "gradients of keys and values", True, ring.size, is_wide=True)


def _key_value_heads(heads: Heads, swapping: Ranks | None) -> int:
    """Number of exchanged key/value heads; if there are fewer heads than ranks, each is sent to several ranks."""
    return heads.key_value if swapping is None else max(heads.key_value, swapping.size)
