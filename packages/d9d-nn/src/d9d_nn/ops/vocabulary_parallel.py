"""Op ``vocabulary_parallel_cross_entropy``: output projection and loss if the vocabulary is sharded over ranks.

No rank ever has the logits of the whole vocabulary: each rank computes the logits of its rows of the weight, and ranks
exchange four numbers per token (Shoeybi et al. 2019, "Megatron-LM", section 3, which fuses the head with the loss).

A backend computes the passes over the logits, and calls :func:`merge_statistics` and :func:`merge_ranks` to
communicate, so that every backend runs the collectives that the head declares. The function of a backend takes the
arguments ``first`` and ``group`` of :class:`VocabularyParallelCrossEntropy` and returns the loss function of a shard.

Shapes: T tokens, H features, V token ids (rows of the weight) of this rank, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import VocabularyShare
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from d9d_nn.ops.linear_cross_entropy import (
    IGNORE,
    add_product,
    autocast_dtype,
    capped,
    chunks_of,
    uncap_,
    wide_of,
)

#: Token rank of positions where nothing is predicted.
IGNORED_RANK = -1


class VocabularyParallelCrossEntropy:
    """Vocabulary-parallel :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`: ranks shard the vocabulary.

    Logits are computed again in the backward, chunk by chunk, unless they are few.

    Args:
        first: first token id of this rank's shard.
        group: process group over which the vocabulary is sharded.
        softcap: each logit x becomes ``softcap * tanh(x / softcap)``; ``None`` for no cap.

    Attributes:
        first: first token id of this rank's shard.
        group: process group over which the vocabulary is sharded.
        softcap: each logit x becomes ``softcap * tanh(x / softcap)``; ``None`` for no cap.
    """

    def __init__(self, first: int, group: dist.ProcessGroup, softcap: float | None = None) -> None:
        self.first, self.group, self.softcap = first, group, softcap

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyParallelCrossEntropy:
        """Return the same object, because it has no state and a process group cannot be copied."""
        return self

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None, keep: bool | None = None
    ) -> Tensor:
        """Compute the loss of each token. Collective over the group, whose ranks have equal hidden states and targets.

        Args:
            hidden: [..., H].
            weight: [V, H], the rank's shard; V may be zero.
            targets: int64 [...], ids in the whole vocabulary; ``IGNORE`` where nothing is predicted.
            rows: C, number of tokens per chunk; ``None`` computes it from the device type and V.
            keep: whether to keep the logits for the backward; ``None`` keeps them if they are few.

        Returns:
            float32 (float64 for float64 inputs) [...], the same on all ranks. The gradient of ``hidden`` is this rank's
            part of a sum over all ranks.

        Raises:
            IndexError: a target is not in the vocabulary; on a GPU, its loss is NaN instead.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None, keep: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses as in a call, and the ranks of the targets in the whole vocabulary, int64 [...].

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`. Collective over the group.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=True)

    def compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, keep: bool | None, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute losses, and token ranks if ``ranked``, else an empty tensor. Collective over the group."""
        rows, keep = chunks_of(hidden, weight, targets, rows, keep)
        dtype = autocast_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            narrow, share = (hidden, weight) if dtype is None else (hidden.to(dtype), weight.to(dtype))
            found: tuple[Tensor, Tensor] = _Loss.apply(
                narrow.flatten(0, -2), share, targets, self.first, self.group, rows, keep, ranked, self.softcap
            )
        return found


class VocabularyParallelSlot(OpSlot):
    """Slot of the op for one shard of the vocabulary; a backend gets the shard when it is bound.

    With a soft cap, the op has another name, so that no backend can ignore the soft cap.

    Args:
        share: this rank's shard of the vocabulary.
        softcap: each logit x becomes ``softcap * tanh(x / softcap)``; ``None`` for no cap.
    """

    def __init__(self, share: VocabularyShare, softcap: float | None = None) -> None:
        name = "vocabulary_parallel_cross_entropy" if softcap is None else "capped_vocabulary_parallel_cross_entropy"
        super().__init__(name, VocabularyParallelCrossEntropy(share.first, share.group, softcap))
        self._share = share

    def bind(self, backend: str, function: Callable[..., Any]) -> None:
        """Bind a backend: the op becomes the result of ``function(first, group)`` for this rank's shard."""
        super().bind(backend, function(self._share.first, self._share.group))


class Merged(NamedTuple):
    """Softmax statistics over the whole vocabulary, the same on all ranks. All but the losses are [T].

    Attributes:
        losses: float32 or wider [...]; zero where nothing is predicted, NaN where a target is not in the vocabulary.
        highest: largest logit.
        total: sum of ``exp(logit - highest)``.
        own: logit of the target.
    """

    losses: Tensor
    highest: Tensor
    total: Tensor
    own: Tensor


def merge_statistics(
    highest: Tensor, total: Tensor, own: Tensor, mine: Tensor, targets: Tensor, group: dist.ProcessGroup
) -> Merged:
    """Merge the softmax statistics of all shards of the vocabulary, in two all-reduces. Collective over the group.

    Args:
        highest: largest logit of the rank's shard, float32 or wider [T]; from a rank with an empty shard, a value that
            is at most the smallest logit of the other ranks.
        total: sum of ``exp(logit - highest)`` over the rank's shard, of the same dtype [T].
        own: logit of the target if its id is in the rank's shard, else 0, of the same dtype [T].
        mine: whether the target's id is in the rank's shard, bool [T].
        targets: int64 [...], ids in the whole vocabulary; ``IGNORE`` where nothing is predicted.
        group: process group over which the vocabulary is sharded.

    Raises:
        IndexError: a target is not in the vocabulary, and the tensors are on a CPU.
    """
    most = highest.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    # The total of a rank with an empty shard is 0. An infinite maximum gives a loss of NaN, as in the reference.
    sums = torch.stack([torch.where(total > 0, total * (highest - most).exp(), total), own, mine.to(own.dtype)])
    dist.all_reduce(sums, group=group)
    words = targets.flatten()
    predicted = words != IGNORE
    unknown = predicted & (sums[2] == 0)
    if not targets.is_cuda and unknown.any():
        raise IndexError(f"the target id {words[unknown][0]} is not in the vocabulary; use the tokenizer of the model")
    # On a GPU the host does not wait for an error: the loss of a wrong target is NaN, and the step is refused.
    # The result is filled through a view, but is no view itself: FSDP2 warns about modules that return views.
    losses = most.new_empty(targets.shape)
    flat = losses.view(-1)
    torch.sub(most + sums[0].log(), sums[1], out=flat).masked_fill_(~predicted, 0).masked_fill_(unknown, torch.nan)
    return Merged(losses, most, sums[0], sums[1])


def merge_ranks(counts: Tensor, targets: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce the token ranks, which each process counted in its shard of the vocabulary. Collective over the group.

    Args:
        counts: int64, of the shape of ``targets``: number of logits in this process's shard that are larger than the
            target's logit, or NaN. Overwritten by the number in the whole vocabulary, which is the token rank, and by
            :data:`IGNORED_RANK` where nothing is predicted.
        targets: int64 [...], ids in the whole vocabulary; ``IGNORE`` where nothing is predicted.
        group: process group over which the vocabulary is sharded.
    """
    dist.all_reduce(counts, group=group)
    counts.masked_fill_(targets == IGNORE, IGNORED_RANK)


def gather_words(logits: Tensor, words: int, share: VocabularyShare) -> Tensor:
    """All-gather the logits of all shards of the vocabulary. Collective over the share's group, forward only.

    Args:
        logits: [..., V], logits of this rank's shard. All shards are equally large but the last ones, as in DTensors.
        words: size of the whole vocabulary.
        share: this rank's shard of the vocabulary.

    Returns:
        [..., words]. All ranks must compute the same loss from these logits, because the backward keeps on each rank
        only the gradient of its own shard.
    """
    out: Tensor = _GatherWords.apply(logits, words, share)
    return out


class _GatherWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: int, share: VocabularyShare) -> Tensor:
        ctx.own = slice(share.first, share.first + share.size)
        size = dist.get_world_size(share.group)
        most = -(-words // size)
        mine = functional.pad(logits, (0, most - logits.shape[-1]))
        parts = mine.new_empty(size, *mine.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), mine.contiguous(), group=share.group)
        return parts.movedim(0, -2).flatten(-2)[..., :words]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.own], None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        group: dist.ProcessGroup,
        rows: int,
        keep: bool,
        ranked: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        shape, targets = targets.shape, targets.flatten()
        predicted = targets != IGNORE
        # Zero times NaN is NaN, in the gradient of the weight too.
        hidden = hidden.masked_fill(~predicted.unsqueeze(1), 0)
        words = targets - first
        mine = predicted & (words >= 0) & (words < len(weight))
        words = words.masked_fill(~mine, 0).unsqueeze(1)
        kept = capped(functional.linear(hidden, weight), softcap) if keep else None
        highest, own = (hidden.new_zeros(len(hidden), dtype=wide_of(hidden.dtype)) for _ in range(2))
        highest.fill_(-torch.inf)
        total = own.clone()
        for chunk, logits in _logits(hidden, weight, kept, rows, softcap):
            highest[chunk] = logits.amax(1)
            # Torch computes in the wider of the two dtypes, without a wide copy of the logits.
            total[chunk] = (logits - highest[chunk].unsqueeze(1)).exp_().sum(1)
            own[chunk] = logits.gather(1, words[chunk]).squeeze(1).to(own.dtype).masked_fill(~mine[chunk], 0)
        losses, highest, total, own = merge_statistics(highest, total, own, mine, targets.view(shape), group)
        ranks = targets.new_zeros(shape if ranked else 0)
        if ranked:
            counted = ranks.view(-1)
            for chunk, logits in _logits(hidden, weight, kept, rows, softcap):
                counted[chunk] = logits.shape[1] - (logits <= own[chunk].unsqueeze(1)).sum(1)
            merge_ranks(ranks, targets.view(shape), group)
        log_sum = highest + total.log()
        ctx.save_for_backward(hidden, weight, words, mine, predicted, log_sum, kept)
        ctx.rows, ctx.softcap = rows, softcap
        ctx.mark_non_differentiable(ranks)
        return losses, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _ranks: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, words, mine, predicted, log_sum, kept = ctx.saved_tensors
        grad_token = grad_loss.flatten().masked_fill(~predicted, 0).unsqueeze(1)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide_of(weight.dtype)) if ctx.needs_input_grad[1] else None
        for chunk, logits in _logits(hidden, weight, kept, ctx.rows, ctx.softcap):
            # Where nothing is predicted, hidden states are zeros, and the gradient is multiplied by zero.
            grad = (logits - log_sum[chunk].unsqueeze(1)).exp_()
            grad.scatter_add_(1, words[chunk], -mine[chunk].to(grad.dtype).unsqueeze(1))
            scaled = torch.mul(grad, grad_token[chunk], out=torch.empty_like(logits))
            grad_logits = uncap_(scaled, logits, ctx.softcap)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.mT, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 7


def _logits(hidden: Tensor, weight: Tensor, kept: Tensor | None, rows: int, softcap: float | None) -> Any:
    """Yield chunks of tokens and their logits [C, V]; no chunk if this rank's shard is empty."""
    for start in range(0, len(hidden) if len(weight) else 0, rows):
        chunk = slice(start, start + rows)
        yield chunk, capped(functional.linear(hidden[chunk], weight), softcap) if kept is None else kept[chunk]
