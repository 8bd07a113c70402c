"""Decoder over a forward pass: continuations of prompts, in any layout, without a cache of keys and values.

Each new token costs a forward over the padded prompts, which suits a few prompts now and then: it needs nothing of the
model but its logits. Shapes: B samples, S positions, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from d9d_core.errors import BuildError
from d9d_core.grid import AXES
from d9d_core.protocols.forward import ForwardPass
from d9d_core.protocols.topology import Topology
from d9d_core.types import Microbatch
from torch import Tensor
from torch import distributed as dist

#: Contributions of a rank that does not decide, and of one that should and cannot; ids of tokens are larger.
_OTHERS, _NO_LOGITS = -2, -1


@dataclass(frozen=True)
class Choice:
    """Choice of the next token.

    Attributes:
        max_new_tokens: most tokens of a continuation.
        temperature: divides the logits before a token is drawn; 0 takes the most probable one.
        seed: of the draws, which use a generator of their own.
        stop: tokens that end a text.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


def continuations(
    forward: ForwardPass, topology: Topology, prompts: Sequence[Sequence[int]], choice: Choice, rows: int = 8
) -> list[list[int]]:
    """Continue prompts. Collective over all ranks, which give the same arguments and get the same result.

    Each rank runs all prompts, so that collectives of sharded parameters and experts match. One rank chooses, and all
    ranks learn its tokens by an all-reduce over the world, because ranks that stop at different tokens would hang.

    Args:
        forward: gives ``logits`` [B, S, V] on the last stage.
        topology: this process among others.
        prompts: token ids, at least one for each prompt.
        choice: how tokens are chosen.
        rows: prompts of one microbatch; logits of so many are in memory at once.

    Returns:
        The new tokens of each prompt, with the one that ended it.

    Raises:
        BuildError: the model gives no logits.
    """
    batch = _Batch.of(prompts, choice.max_new_tokens, max(forward.least_microbatches, -(-len(prompts) // rows)))
    generator = torch.Generator().manual_seed(choice.seed)
    found: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    for _ in range(choice.max_new_tokens):
        tokens = _next_tokens(forward, topology, batch, choice, generator)
        for row in sorted(active):
            found[row].append(tokens[row])
            batch.append(row, tokens[row])
            if tokens[row] in choice.stop:
                active.discard(row)
        if not active:
            break
    return found


@dataclass(frozen=True)
class _Batch:
    """Prompts padded on the right to the length of the longest continuation: one shape for all forwards.

    Attributes:
        tokens: int64 [B, S] on the host; B is a multiple of the number of microbatches.
        lengths: int64 [B], tokens of each row so far.
        microbatches: number of parts of equal size.
    """

    tokens: Tensor
    lengths: Tensor
    microbatches: int

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], new: int, microbatches: int) -> _Batch:
        rows = -(-len(prompts) // microbatches) * microbatches
        # Rows that only fill microbatches repeat the first prompt.
        given = [*prompts, *[prompts[0]] * (rows - len(prompts))]
        tokens = torch.zeros(rows, max(map(len, given)) + new, dtype=torch.int64)
        for row, ids in enumerate(given):
            tokens[row, : len(ids)] = torch.tensor(ids)
        return cls(tokens, torch.tensor([len(ids) for ids in given]), microbatches)

    def append(self, row: int, token: int) -> None:
        self.tokens[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def pack(self, device: torch.device) -> list[Microbatch]:
        parts = zip(self.tokens.chunk(self.microbatches), self.lengths.chunk(self.microbatches), strict=True)
        return [{"tokens": tokens.to(device), "lengths": lengths.to(device)} for tokens, lengths in parts]


def _next_tokens(
    forward: ForwardPass, topology: Topology, batch: _Batch, choice: Choice, generator: torch.Generator
) -> list[int]:
    """Next token of each row, equal on all ranks."""
    pack = batch.pack(topology.device)
    found: dict[int, Tensor | None] = {}

    def take(outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
        index = next(number for number, one in enumerate(pack) if one is microbatch)
        logits = outputs.get("logits")
        last = microbatch["lengths"] - 1
        found[index] = None if logits is None else logits[torch.arange(len(last), device=last.device), last]

    forward(pack, take)
    tokens = torch.full((len(batch.tokens),), _OTHERS)
    if found and all(at == 0 for axis, at in topology.coordinate.items() if axis != "pp"):
        parts = [found[index] for index in sorted(found)]
        logits = [part for part in parts if part is not None]
        tokens = (
            _chosen(torch.cat(logits), choice, generator) if len(logits) == len(parts) else tokens.fill_(_NO_LOGITS)
        )
    if (group := topology.axes_group(*AXES)) is not None:
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=group)
    if (tokens < 0).any():
        raise BuildError(
            "the model gives no logits, so it cannot continue a text; it needs one head of kind causal_lm and no other"
        )
    return list(tokens.tolist())


def _chosen(logits: Tensor, choice: Choice, generator: torch.Generator) -> Tensor:
    """Choose a token of each row of logits [B, V]: int64 [B] on the host."""
    if choice.temperature == 0:
        return logits.argmax(-1).cpu()
    # On the host, so that draws do not depend on the device.
    probabilities = (logits.double().cpu() / choice.temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
