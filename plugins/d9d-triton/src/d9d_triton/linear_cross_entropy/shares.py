"""Backend ``triton`` of the op ``vocabulary_parallel_cross_entropy``, where the vocabulary is sharded over ranks.

A rank's shard is one chunk of the vocabulary. So the chunk kernels compute its statistics and, after d9d-nn has merged
the statistics of all ranks, overwrite its logits with their gradient.

Shapes: T tokens, H features, V vocabulary entries of a rank, P columns of logits in memory, C tokens of a chunk, K
tokens whose logits are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from d9d_nn.ops.linear_cross_entropy import IGNORE, may_be_kept
from d9d_nn.ops.vocabulary_parallel import VocabularyParallelCrossEntropy, merge_ranks, merge_statistics
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from d9d_triton.linear_cross_entropy.backend import check_operands, rows_of_chunk
from d9d_triton.linear_cross_entropy.parts import (
    add_product,
    empty,
    parts_of,
    project,
    space_for,
    total_of,
    without_ignored,
)
from d9d_triton.linear_cross_entropy.passes import LOWEST, columns, count_chunk, gradient_in_place, include_chunk

_OP = "vocabulary_parallel_cross_entropy"


def build(_signature: OpSignature) -> type[VocabularyShareCrossEntropy]:
    """Build the backend ``triton``: a class that takes a shard of the vocabulary and computes the losses."""
    return VocabularyShareCrossEntropy


class VocabularyShareCrossEntropy(VocabularyParallelCrossEntropy):
    """Linear cross-entropy over a shard of the vocabulary by Triton: loss of each token.

    It makes three matrix products and two passes over the logits. As many logits as :func:`may_be_kept` allows are kept
    for the backward, which recomputes the logits of the other tokens, in fewer chunks than the reference, because there
    are no float32 logits. The backward overwrites kept logits with their gradient, so a second backward
    (``retain_graph``) is an autograd error, unless ``keep=False``.
    """

    def compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, keep: bool | None, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and, if ``ranked``, how many logits of all ranks exceed each target's logit.

        Collective over the process ranks that share the vocabulary.

        Args:
            hidden: [..., H].
            weight: [V, H], of the same dtype: the rank's shard; V may be zero.
            targets: int64 [...], indices into the whole vocabulary; ``IGNORE`` for tokens without a target.
            rows: largest number of tokens in a chunk; ``None`` chooses it by V.
            keep: whether to keep all logits or none; ``None`` keeps as many as
                :func:`~d9d_nn.ops.linear_cross_entropy.may_be_kept` allows.
            ranked: whether to count the logits above each target's logit, for which logits that were not kept are
                computed again.

        Raises:
            TypeError: the kernels do not support the dtype, or hidden and weight differ in dtype.
            ValueError: the numbers of targets and hidden states differ.
            IndexError: a target is outside of the vocabulary; on a GPU its loss is NaN instead.
        """
        hidden, weight = autocast_operands(hidden, weight)
        check_operands(_OP, hidden, weight, targets)
        size, tokens, kept = max(1, columns(weight.shape[0])), targets.numel(), 0
        rows = rows_of_chunk(hidden, size) if rows is None else rows
        again = ranked or (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
        if again and keep is not False:
            kept = tokens if keep else min(tokens, may_be_kept(hidden) // size)
        found: tuple[Tensor, Tensor] = _Loss.apply(hidden, weight, targets, self.first, self.group, rows, kept, ranked)
        return found


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
        kept: int,
        ranked: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, words = hidden.flatten(0, -2), targets.flatten().contiguous()
        statistics = torch.empty(2, len(words), dtype=torch.float32, device=hidden.device)
        statistics[0], statistics[1] = LOWEST, 0.0
        own, facts = torch.zeros_like(statistics[0]), {"words": len(weight), "ignored": IGNORE}
        logits = space_for(kept, hidden, weight)
        parts = parts_of(len(words), logits, rows) if len(weight) else []
        for part, space in parts:
            project(tokens[part], weight, space)
            include_chunk(space, words[part], own[part], statistics[:, part], first=first, **facts)
        mine = (words >= first) & (words < first + len(weight))
        merged = merge_statistics(statistics[0], statistics[1], own, mine, targets, group)
        ranks = torch.zeros(targets.shape if ranked else 0, dtype=torch.int64, device=hidden.device)
        if ranked:
            for part, space in reversed(parts):
                if part.stop > kept and part is not parts[-1][0]:  # the buffer still holds the last chunk's logits
                    project(tokens[part], weight, space)
                count_chunk(space, words[part], merged.own[part], ranks.view(-1)[part], **facts)
            merge_ranks(ranks, targets, group)
        # Saved tensors make autograd refuse a second backward once the first one has overwritten kept logits.
        ctx.save_for_backward(
            hidden, weight, targets, torch.stack([merged.highest, merged.total]), *((logits,) if kept else ())
        )
        ctx.first, ctx.rows = first, rows
        ctx.mark_non_differentiable(ranks)
        return merged.losses, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _ranks: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, statistics, *kept = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        tokens, masked = hidden.flatten(0, -2), without_ignored(hidden, targets, of_weight)
        words, grads = (tensor.flatten().contiguous() for tensor in (targets, grad_losses))
        logits = kept[0] if kept else space_for(0, hidden, weight)
        torch.autograd.graph.increment_version(logits)  # autograd does not see the writes of Triton kernels
        grad_hidden = empty(hidden, hidden.dtype, of_hidden)
        parts = parts_of(len(words), logits, ctx.rows) if len(weight) else []
        if of_hidden and not parts:
            grad_hidden.zero_()
        # A sum over many chunks would lose bits in a narrow dtype; a single product accumulates in float32 anyway.
        dtype = weight.dtype if len(parts) == 1 else torch.float32
        total: Tensor | None = None
        for part, space in parts:
            if part.stop > len(logits):
                project(tokens[part], weight, space)
            gradient_in_place(
                space, words[part], statistics[:, part], grads[part], words=len(weight), ignored=IGNORE, first=ctx.first
            )
            grad = space[:, : len(weight)]
            if of_hidden:
                torch.mm(grad, weight, out=grad_hidden.flatten(0, -2)[part])
            if of_weight:
                total = add_product(total, grad.t(), masked[part], dtype)
        grad_weight = total_of(total, weight, of_weight).to(weight.dtype)
        return grad_hidden if of_hidden else None, grad_weight if of_weight else None, *(None,) * 6
