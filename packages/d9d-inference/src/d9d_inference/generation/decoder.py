"""Decoder that generates with full forwards, in any layout, without a cache of keys and values.

Each new token costs a forward over the padded sequences; the model only has to return logits. The shape of a forward
depends only on the microbatch, so the results are bitwise the same in every layout that computes a microbatch alike.

Shapes: B samples of a microbatch, S positions, N new tokens at most, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from d9d_core.errors import BuildError, NonFiniteError
from d9d_core.grid import AXES
from d9d_core.inference import Continuation
from d9d_core.topology import Topology
from d9d_core.trees import map_tree, split
from d9d_core.types import Microbatch, Pack
from d9d_engine.step.randomness import derive_seed
from torch import Tensor
from torch import distributed as dist

#: Function that runs the model over microbatches, and calls its second argument with the last stage's outputs of each.
Forward = Callable[[Pack, Callable[[Mapping[str, Tensor], Microbatch], None]], None]
#: Axes along which ranks have different sequences; ranks along other axes compute the same sequences together.
_DATA = ("dp_replicate", "dp_shard")
#: Values in the max all-reduce of tokens, all below token ids: this rank does not choose; not finite; no logits.
_OTHERS, _NOT_FINITE, _NO_LOGITS = -3, -2, -1
#: Value in ``Sequences.new`` after a sequence's last new token.
_NOTHING = -1
#: The width of a forward is rounded up to a multiple of this.
_GROWTH = 64


@dataclass(frozen=True, slots=True)
class Sequences:
    """Growing sequences of one microbatch.

    Attributes:
        tokens: int64 [B, S + N] on the device, maybe with more padding.
        lengths: int64 [B] on the device, current number of tokens of each sequence.
        longest: largest number of tokens of a sequence before the first new token.
        growth: the width of a forward is rounded up to a multiple of this.
        numbers: row index of each sequence, which seeds its sampling; -1 for a sequence that only fills up the
            microbatch, and is not continued.
        new: int64 [B, N] on the host, the new tokens, -1 after the last one.
        ended: bool [B] on the host, whether the last token ends the sequence.
    """

    tokens: Tensor
    lengths: Tensor
    longest: int
    growth: int
    numbers: list[int]
    new: Tensor
    ended: Tensor

    @classmethod
    def of(cls, microbatch: Microbatch, new: int, multiple: int = 1) -> Sequences:
        """Make sequences from a microbatch with ``tokens``, ``rows`` and maybe ``lengths``. Waits for the device.

        Args:
            microbatch: microbatch on the device.
            new: largest number N of new tokens.
            multiple: required divisor of the number of positions in each forward.
        """
        given = microbatch["tokens"]
        rows, positions = given.shape
        lengths = microbatch.get("lengths", torch.full((rows,), positions, device=given.device)).clone()
        return cls(
            tokens=torch.nn.functional.pad(given, (0, new + -(positions + new) % multiple)),
            lengths=lengths,
            longest=int(lengths.max()),
            growth=math.lcm(_GROWTH, multiple),
            numbers=microbatch["rows"].tolist(),
            new=torch.full((rows, new), _NOTHING),
            ended=torch.zeros(rows, dtype=torch.bool),
        )

    @property
    def active(self) -> list[int]:
        """Indices in the microbatch of the sequences that have not ended, without fillers."""
        ended = self.ended.tolist()
        return [place for place, number in enumerate(self.numbers) if number >= 0 and not ended[place]]

    def microbatch(self, index: int) -> Microbatch:
        """Microbatch for the forward that computes new token number ``index``."""
        needed = self.longest + index
        width = min(-(-needed // self.growth) * self.growth, self.tokens.shape[1])
        return {"tokens": self.tokens[:, :width], "lengths": self.lengths}

    def append(self, index: int, chosen: Tensor, stop: frozenset[int]) -> None:
        """Append new token number ``index``, int64 [B] on the host, to the sequences that have not ended."""
        places = torch.tensor(self.active, dtype=torch.int64)
        if not len(places):
            return
        self.new[places, index] = chosen[places]
        self.ended[places] = torch.tensor([token in stop for token in chosen[places].tolist()])
        at = places.to(self.tokens.device)
        self.tokens[at, self.lengths[at]] = chosen[places].to(self.tokens.device)
        self.lengths[at] += 1


class Decoder:
    """Generates continuations of token sequences with full forwards.

    Args:
        forward: runs the model; all ranks call it equally often, with equal numbers of microbatches.
        topology: rank, device, meshes and process groups of this process.
        continuation: number of new tokens, and sampling settings.
        stop: token ids that end a sequence.
        logits: returns the logits [B, S, V] from the outputs of the last stage, or ``None``.
        nonfinite: ``error`` if logits with NaN or infinity are an error; otherwise they yield an arbitrary token.
    """

    def __init__(
        self,
        forward: Forward,
        topology: Topology,
        continuation: Continuation,
        stop: frozenset[int],
        logits: Callable[[Mapping[str, Tensor]], Tensor | None],
        nonfinite: Literal["error", "keep"] = "keep",
    ) -> None:
        self._forward = forward
        self._topology = topology
        self._continuation = continuation
        self._stop = stop
        self._logits = logits
        self._nonfinite = nonfinite
        together = [axis for axis in AXES if axis not in _DATA]
        # Of the ranks that compute the same sequences, the first one with the last stage chooses tokens.
        self._may_decide = all(topology.coordinate[axis] == 0 for axis in together if axis != "pp")
        alone = math.prod(topology.sizes[axis] for axis in together) == 1
        self._group = None if alone else topology.axes_group(*together)

    def continue_all(self, pack: Pack) -> list[Sequences]:
        """Continue the sequences of microbatches until all, on all ranks, have ended or reached the length limit.

        Collective over all ranks, with equal numbers of microbatches. Ranks along data-parallel axes have different
        sequences. Ranks with the same sequences agree on tokens by an all-reduce, and all ranks stop together.

        Args:
            pack: microbatches on the device: ``tokens`` int64 [B, S], ``rows`` int64 [B], -1 for fillers, and
                optionally ``lengths`` int64 [B] of right-padded sequences, each at least 1.

        Returns:
            The sequences of each microbatch.

        Raises:
            BuildError: the model returns no logits.
            NonFiniteError: logits have NaN or infinity, and ``nonfinite`` is ``error``.
        """
        multiple = self._topology.sizes["tp"]  # ranks of tp may split the positions of a forward evenly
        all_sequences = [Sequences.of(microbatch, self._continuation.max_new_tokens, multiple) for microbatch in pack]
        sizes = [len(one.numbers) for one in all_sequences]
        for index in range(self._continuation.max_new_tokens):
            tokens = torch.split(self._next_tokens(all_sequences, index), sizes)
            for one, chosen in zip(all_sequences, tokens, strict=True):
                one.append(index, chosen, self._stop)
            if not self._any_active(all_sequences):
                break
        return all_sequences

    def _next_tokens(self, all_sequences: Sequence[Sequences], index: int) -> Tensor:
        """Next token of each sequence in all microbatches, int64 on the host; equal on ranks with equal sequences."""
        pack = [one.microbatch(index) for one in all_sequences]
        found: dict[int, Tensor | None] = {}

        def take(outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
            number = next(number for number, one in enumerate(pack) if one is microbatch)
            logits, last = self._logits(outputs), microbatch["lengths"] - 1
            found[number] = None if logits is None else logits[torch.arange(len(last), device=last.device), last]

        self._forward(pack, take)
        parts = []
        for number, one in enumerate(all_sequences):
            part = torch.full((len(one.numbers),), _OTHERS)
            if self._may_decide and number in found:
                logits = found[number]
                part = part.fill_(_NO_LOGITS) if logits is None else self._choose(logits, one, index)
            parts.append(part)
        tokens = torch.cat(parts)
        if self._group is not None:
            dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self._group)
        if (tokens == _NOT_FINITE).any():
            numbers = [number for one in all_sequences for number in one.numbers]
            row = min(number for number, token in zip(numbers, tokens.tolist(), strict=True) if token == _NOT_FINITE)
            raise NonFiniteError(
                f"row {row}: the logits of its new token number {index} have NaN or infinity; check the model and its "
                "number format, or continue with arbitrary tokens by 'nonfinite: keep'"
            )
        if (tokens < 0).any():
            raise BuildError(
                "the model returns no logits, so it cannot continue a text; give it a single head of kind causal_lm, "
                "or a task that names the head"
            )
        return tokens

    def _choose(self, logits: Tensor, sequences: Sequences, index: int) -> Tensor:
        """Choose a token for each row of logits [B, V]; return int64 [B] on the host."""
        if self._continuation.temperature == 0:
            chosen = logits.argmax(-1).cpu()
        else:
            chosen = self._drawn(logits, sequences.numbers, index)
        if self._nonfinite == "error":
            # Test the largest logit: excluded tokens have a logit of minus infinity.
            wrong = ~logits.amax(-1).isfinite().cpu()
            wrong &= torch.isin(torch.arange(len(wrong)), torch.tensor(sequences.active, dtype=torch.int64))
            chosen[wrong] = _NOT_FINITE
        return chosen

    def _drawn(self, logits: Tensor, numbers: Sequence[int], index: int) -> Tensor:
        """Sample a token for each row of logits [B, V] with one uniform number each; return int64 [B] on the host."""
        # Computed on the host, because a cumulative sum on a GPU is not deterministic.
        sums = (logits.double().cpu() / self._continuation.temperature).softmax(-1).cumsum(-1)
        seeds = [derive_seed(self._continuation.seed, "row", number, "token", index) for number in numbers]
        draws = torch.tensor([seed / 2**63 for seed in seeds], dtype=torch.float64)[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, draws, right=True).clamp(max=sums.shape[1] - 1)[:, 0]

    def _any_active(self, all_sequences: Sequence[Sequences]) -> bool:
        """Whether any rank has a sequence that has not ended. Collective over all ranks, with CPU tensors."""
        active = torch.tensor([float(any(one.active for one in all_sequences))])
        if (world := self._topology.axes_group(*AXES)) is not None:
            dist.all_reduce(active, dist.ReduceOp.MAX, group=world)
        return bool(active)


def padded_prompts(prompts: Sequence[Sequence[int]], microbatches: int, device: torch.device) -> Pack:
    """Make microbatches of equal size from prompts, padded on the right, for a :class:`Decoder`.

    Args:
        prompts: token ids of each prompt, at least one id each; their indices become ``rows``.
        microbatches: number of microbatches; fillers repeat the first prompt.
        device: target device.
    """
    size = -(-len(prompts) // microbatches)
    fillers = size * microbatches - len(prompts)
    given = [*prompts, *[prompts[0]] * fillers]
    tokens = torch.zeros(len(given), max(map(len, given)), dtype=torch.int64)
    for row, ids in enumerate(given):
        tokens[row, : len(ids)] = torch.tensor(ids)
    whole = {
        "tokens": tokens,
        "lengths": torch.tensor([len(ids) for ids in given]),
        "rows": torch.tensor([*range(len(prompts)), *[-1] * fillers]),
    }
    return split(map_tree(lambda tensor: tensor.to(device), whole), 0, microbatches)
