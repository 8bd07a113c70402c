"""Op ``linear_cross_entropy``: output projection and loss of each token, without all logits in memory.

Shapes: T tokens, H features, V vocabulary size, C tokens of a chunk. The slot's static facts are ``features``
and ``vocabulary``.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

#: Target id of positions where nothing is predicted.
IGNORE = -100
#: Largest number of logits that are kept from forward to backward: 512 MiB in float32. More logits are computed twice.
KEPT_ELEMENTS = 1 << 27
#: A GPU may keep more logits: as many bytes as its memory divided by this.
_KEPT_PART = 20
#: Largest number of probabilities in memory at once, by device type: small chunks are fast on a CPU, but not on a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 28
_LEAST_ROWS = 256


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: int | None = None,
    keep: bool | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Reference of linear cross-entropy: ``-log_softmax(hidden @ weight.T)[target]`` per token, float32 or wider.

    Tokens are processed in chunks. If there are few logits (at most :data:`KEPT_ELEMENTS`, or a twentieth of a GPU's
    memory), they are kept for the backward in the dtype of ``hidden``. Otherwise the backward computes them again,
    chunk by chunk, which costs a third more work and limits the memory.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...]; :data:`IGNORE` where nothing is predicted.
        rows: C, number of tokens per chunk; ``None`` computes it from the device type and V.
        keep: whether to keep the logits for the backward; ``None`` keeps them if they are few.
        softcap: each logit x becomes ``softcap * tanh(x / softcap)`` (Gemma team 2024, "Gemma 2", section 2); ``None``
            leaves logits as they are.

    Returns:
        float32 (float64 for float64 inputs) [...]; zero, with zero gradient, where the target is :data:`IGNORE`. There
        the hidden state may be anything, including NaN: unlike in :func:`torch.nn.functional.cross_entropy`, it never
        affects the gradient of the weight.
    """
    rows, keep = chunks_of(hidden, weight, targets, rows, keep)  # chosen by the dtype before autocast
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        # Cast as autocast does for a linear layer; casts inside the function would also change dtypes of the backward.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(
                hidden.to(dtype), weight.to(dtype), targets, rows=rows, keep=keep, softcap=softcap
            )
    loss: Tensor = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets, rows, keep, False, softcap)
    return loss


def linear_cross_entropy_with_ranks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: int | None = None,
    keep: bool | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear cross-entropy, bit for bit as :func:`linear_cross_entropy`, and each target's rank in the vocabulary.

    Ranks are counted from the logits of each chunk, which costs one more pass over them, but no matrix product.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...]; :data:`IGNORE` where nothing is predicted.
        rows: C, number of tokens per chunk; ``None`` computes it from the device type and V.
        keep: whether to keep the logits for the backward; ``None`` keeps them if they are few.
        softcap: each logit x becomes ``softcap * tanh(x / softcap)``; ``None`` for no cap.

    Returns:
        The loss, and the ranks int64 [...]: the number of logits larger than the target's. So 0 is a correct
        prediction, and less than k means that the target is one of the k most probable tokens; tokens as probable as
        the target do not count. The rank is V where the target's logit is NaN, and -1 where the target is
        :data:`IGNORE`.
    """
    rows, keep = chunks_of(hidden, weight, targets, rows, keep)
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy_with_ranks(
                hidden.to(dtype), weight.to(dtype), targets, rows=rows, keep=keep, softcap=softcap
            )
    found: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, targets, rows, keep, True, softcap
    )
    return found


@runtime_checkable
class CountsRanks(Protocol):
    """Protocol of a backend function that also counts token ranks from its logits.

    For backends without it, :func:`target_ranks` counts the ranks.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each target, as :func:`linear_cross_entropy` does."""
        ...

    def with_ranks(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rank of each target, as :func:`linear_cross_entropy_with_ranks` does."""
        ...


def target_ranks(hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None) -> Tensor:
    """Compute only the ranks of :func:`linear_cross_entropy_with_ranks`, if another backend computes the losses."""
    with torch.no_grad():
        return linear_cross_entropy_with_ranks(hidden, weight, targets, rows=rows, keep=False)[1]


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Dtype in which autocast computes products with ``hidden``; ``None`` if autocast is off."""
    device = hidden.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def chunks_of(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, keep: bool | None) -> tuple[int, bool]:
    """Number of tokens per chunk, and whether the logits are kept for the backward."""
    vocabulary = weight.shape[0]
    if rows is None:
        rows = max(
            _LEAST_ROWS, _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // max(1, vocabulary)
        )
    if keep is None:
        keep = targets.numel() * vocabulary <= may_be_kept(hidden)
    return rows, keep


def may_be_kept(hidden: Tensor) -> int:
    """Maximum number of logits to keep from forward to backward, in the dtype and on the device of ``hidden``."""
    if hidden.device.type != "cuda":
        return KEPT_ELEMENTS
    memory: int = torch.cuda.get_device_properties(hidden.device).total_memory
    return max(KEPT_ELEMENTS, memory // _KEPT_PART // hidden.itemsize)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums over a tensor are computed: float32, or the tensor's dtype if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits after a soft cap, see :func:`linear_cross_entropy`; the same tensor if there is no soft cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def uncap_(grad: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """Turn the gradient of capped logits into the gradient of the logits before the soft cap, in place."""
    return grad if softcap is None else grad.mul_(1 - (logits / softcap).square_())


def _chunk_loss(logits: Tensor, words: Tensor) -> Tensor:
    """Loss [C] of logits [C, V] and target ids int64 [C, 1]."""
    return -functional.log_softmax(logits, dim=-1, dtype=wide_of(logits.dtype)).gather(1, words).squeeze(1)


def _chunk_grad(logits: Tensor, words: Tensor, grad_loss: Tensor) -> Tensor:
    """Gradient ``(softmax(logits) - onehot(target)) * grad_loss``, [C, V] as the logits; grad_loss is [C, 1]."""
    grad = functional.softmax(logits, dim=-1, dtype=wide_of(logits.dtype))
    grad.scatter_add_(1, words, grad.new_full((1, 1), -1.0).expand_as(words))
    # Write the narrow tensor directly: a product in place and a cast would read and write the wide tensor again.
    return torch.mul(grad, grad_loss, out=torch.empty_like(logits))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b``; ``total`` may have a wider dtype than ``a`` and ``b``."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.device.type == "cuda":  # on CUDA, the product itself can add to a tensor of the wide dtype
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _chunk_ranks(logits: Tensor, words: Tensor) -> Tensor:
    """Number [C] of logits [C, V] that are NaN or larger than the target's logit; V if the target's logit is NaN."""
    return logits.shape[1] - (logits <= logits.gather(1, words)).sum(1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        keep: bool,
        ranked: bool,
        softcap: float | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        shape, targets = targets.shape, targets.flatten()
        predicted = targets != IGNORE
        # Ignored targets become 0, a valid index, and are masked below; other negative targets raise an index error.
        words = targets.masked_fill(~predicted, 0).unsqueeze(1)
        # Zero times NaN is NaN, in the gradient of the weight too. A copy of [T, H] is small compared with [T, V].
        hidden = hidden.masked_fill(~predicted.unsqueeze(1), 0)
        kept = capped(functional.linear(hidden, weight), softcap) if keep else None
        # The result is filled through a view, but is no view itself: FSDP2 warns about modules that return views.
        losses = hidden.new_empty(shape, dtype=wide_of(hidden.dtype))
        flat = losses.view(-1)
        ranks = torch.empty(shape, dtype=torch.int64, device=hidden.device) if ranked else None
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = capped(functional.linear(hidden[chunk], weight), softcap) if kept is None else kept[chunk]
            flat[chunk] = _chunk_loss(logits, words[chunk])
            if ranks is not None:
                ranks.view(-1)[chunk] = _chunk_ranks(logits, words[chunk])
        flat.masked_fill_(~predicted, 0)
        ctx.save_for_backward(hidden, weight, words, predicted, kept)
        ctx.rows, ctx.softcap = rows, softcap
        if ranks is None:
            return losses
        ranks.view(-1).masked_fill_(~predicted, -1)
        ctx.mark_non_differentiable(ranks)
        return losses, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_ranks: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, words, predicted, kept = ctx.saved_tensors
        grad_token = grad_loss.flatten().masked_fill(~predicted, 0).unsqueeze(1)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over many chunks would lose bits in a narrow dtype.
        grad_weight = torch.zeros_like(weight, dtype=wide_of(weight.dtype)) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = capped(functional.linear(hidden[chunk], weight), ctx.softcap) if kept is None else kept[chunk]
            grad_logits = uncap_(_chunk_grad(logits, words[chunk], grad_token[chunk]), logits, ctx.softcap)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is None:
                continue
            add_product(grad_weight, grad_logits.mT, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 5
