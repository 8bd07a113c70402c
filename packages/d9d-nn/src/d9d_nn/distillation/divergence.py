"""Divergence of a model's next-token distribution from another distribution.

Shapes: T tokens, V vocabulary size, K token ids with a probability in the other distribution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

#: Largest number of elements of each float32 matrix [tokens of a chunk, V] in memory.
_CHUNK_ELEMENTS = 1 << 26


def divergence(
    logits: Tensor, other: Tensor, words: Tensor | None, counted: Tensor, temperature: float = 1.0
) -> Tensor:
    """Kullback-Leibler divergence ``t^2 * sum_v p_v (log p_v - log q_v)`` of each token, computed in float32.

    Here ``q = softmax(logits / t)``, ``p = softmax(other / t)``, and t is the temperature. The gradient with respect to
    the logits is ``t (q - p)``. Chunks of tokens are processed one after another, so of the
    tensors with V columns only the arguments and the gradient are in memory for all tokens.

    Args:
        logits: [T, V].
        other: [T, K], K at most V: logits of the token ids ``words``; other ids have ``p_v = 0``. Gets no gradient.
        words: token ids int64 [T, K], distinct in each row; ``None`` for the ids below K.
        counted: bool [T], the tokens to compute a divergence for; other tokens have zero, and zero gradient.
        temperature: t.

    Returns:
        float32 [T].
    """
    result: Tensor = _Divergence.apply(logits, other, words, counted, temperature)
    return result


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return functional.log_softmax(logits.float() / temperature, dim=-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, other: Tensor, words: Tensor | None, counted: Tensor, temperature: float
    ) -> Tensor:
        rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        result = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for start in range(0, len(logits), rows):
            chunk = slice(start, start + rows)
            theirs = _log_softmax(other[chunk], temperature)
            ours = _log_softmax(logits[chunk], temperature)
            ours = ours[:, : other.shape[1]] if words is None else ours.gather(1, words[chunk])
            probabilities = theirs.exp()
            # A token id of probability zero adds nothing, even if its log is infinite.
            result[chunk] = torch.where(probabilities > 0, probabilities * (theirs - ours), 0).sum(-1)
        ctx.save_for_backward(logits, other, words, counted)
        ctx.temperature, ctx.rows = temperature, rows
        return result.mul_(temperature**2).masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, other, words, counted = ctx.saved_tensors
        factors = (grad.float() * ctx.temperature).masked_fill(~counted, 0).unsqueeze(1)
        result = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            theirs = functional.softmax(other[chunk].float() / ctx.temperature, dim=-1)
            ours = functional.softmax(logits[chunk].float() / ctx.temperature, dim=-1)
            if words is None:
                ours[:, : other.shape[1]] -= theirs
            else:
                ours.scatter_add_(1, words[chunk], -theirs)
            result[chunk] = torch.where(counted[chunk].unsqueeze(1), ours * factors[chunk], 0)
        return result, None, None, None, None
