"""Backends of the op ``linear_cross_entropy``: ``triton``, ``triton_sum``, ``triton_sum_narrow`` and ``triton_words``.

Shapes: T tokens, H features, V words of the vocabulary, C tokens of a chunk, W words of a chunk.
"""

from __future__ import annotations

import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from d9d_nn.ops.linear_cross_entropy import may_be_kept
from torch import Tensor

from d9d_triton.launch import check_floats
from d9d_triton.linear_cross_entropy import narrow
from d9d_triton.linear_cross_entropy.operators import token_losses, token_losses_ahead
from d9d_triton.linear_cross_entropy.passes import columns
from d9d_triton.linear_cross_entropy.words import TILE, token_losses_by_words

#: Logits of a chunk, in bytes. Each chunk but the first costs two passes over the weight's gradient in float32.
_CHUNK_BYTES = 1 << 30
_LEAST_ROWS = 256
#: Logits of a small chunk, in bytes: few, but each chunk of words costs two passes over the gradient of the hidden
#: states in float32, which is why it has some words however many tokens there are.
_SMALL_BYTES = 192 << 20
_LEAST_WORDS = 4096
#: Bytes that a chunk of tokens needs where gradients have no other memory than their own: logits, and hidden states
#: without what is not predicted. For 2,048 features and 151,936 words in bfloat16 these are 1,024 tokens.
_NARROW_BYTES = 304 << 20


def build(_signature: OpSignature) -> LinearCrossEntropy:
    """Backend function of ``triton``; it is the same for all signatures."""
    return LinearCrossEntropy()


def build_sum(_signature: OpSignature) -> LinearCrossEntropy:
    """Backend function of ``triton_sum``; it is the same for all signatures."""
    return LinearCrossEntropy(ahead=True)


def build_sum_narrow(_signature: OpSignature) -> LinearCrossEntropyNarrow:
    """Backend function of ``triton_sum_narrow``; it is the same for all signatures."""
    return LinearCrossEntropyNarrow()


def build_words(_signature: OpSignature) -> LinearCrossEntropyByWords:
    """Backend function of ``triton_words``; it is the same for all signatures."""
    return LinearCrossEntropyByWords()


class LinearCrossEntropy:
    """Triton backend of linear cross-entropy, see :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    Three matrix products and two passes over the logits. As many logits as the reference may keep are kept for the
    backward, those of the other tokens are computed again there. The backward turns kept logits into their gradient,
    in their place: walking a graph twice (``retain_graph``) is an error of autograd's, unless ``keep=False``.

    Below a frozen weight, the forward computes the gradient of the hidden states, chunk by chunk, and keeps no logits:
    what arrives in the backward scales its rows.

    Args:
        ahead: let the forward compute the weight's gradient, too, for a loss that is some number times the sum of all
            tokens' losses. Whether it is, the backward sees without waiting for the device: the gradient of a sum is
            one number in memory. If not, the backward computes everything again, for three products more.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self._ahead = ahead

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None, keep: bool | None = None
    ) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H].
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` where nothing is predicted.
            rows: largest C; ``None`` chooses by V.
            keep: whether to keep all logits, or none; ``None`` keeps as many as
                :func:`~d9d_nn.ops.linear_cross_entropy.may_be_kept` says.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, whatever the hidden state is.

        Raises:
            TypeError: the kernels do not read the dtype, or hidden and weight have two.
            ValueError: there are not as many targets as hidden states.
            IndexError: a target is no word; on a GPU, an assertion on the device.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None, keep: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the same losses and, in the same pass, the ranks int64 [...] of the targets.

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=True)

    def compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, keep: bool | None, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute losses, and ranks if ``ranked``, else no elements."""
        parameter = weight
        hidden, weight = autocast_operands(hidden, weight)
        check_operands("linear_cross_entropy", hidden, weight, targets)
        size = columns(weight.shape[0])
        rows = rows_of_chunk(hidden, size) if rows is None else rows
        recorded = torch.is_grad_enabled()
        of_hidden, of_weight = recorded and hidden.requires_grad, recorded and weight.requires_grad
        if (self._ahead and of_weight) or (of_hidden and not of_weight):
            losses, ranks, *_ = token_losses_ahead(hidden, weight, targets, rows, ranked, of_hidden, of_weight)
            return losses, ranks
        tokens, kept = targets.numel(), 0
        if of_weight and keep is not False:
            kept = tokens if keep else min(tokens, may_be_kept(hidden) // size)
        cast_from = parameter if of_weight and parameter.dtype != weight.dtype else None
        if cast_from is not None:
            weight = weight.detach()
        losses, ranks, *_ = token_losses(hidden, weight, targets, rows, kept, ranked, cast_from)
        return losses, ranks


class LinearCrossEntropyNarrow:
    """Triton backend (narrow) of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy` in memory for few logits.

    As ``triton_sum``, the forward computes the gradients, for a loss that is some number times the sum of all tokens'
    losses, and the backward computes everything again for any other loss. But they are computed, added up and scaled in
    the memory in which the backward returns them, and chunks of tokens are small. So walking a graph twice
    (``retain_graph``) is an error of autograd's.

    Gradients in bfloat16 are less exact: they are rounded before they are scaled, and that of the weight with each
    chunk. N chunks whose parts have random signs give ``sqrt((N + 1) / 2)`` times the error of one rounding, twice for
    N = 8, and what a part adds below half of the sum's last place is lost. Statistics, and sums inside of a product,
    are float32, and nothing is filtered. With float32 for weight and hidden states, it all is as in ``triton_sum``.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H], bfloat16 or float32.
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` where nothing is predicted.
            rows: largest C; ``None`` chooses by V and H.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, whatever the hidden state is.

        Raises:
            TypeError: the dtype is another one, or hidden and weight have two. Nothing but float32 has the range of
                bfloat16, for gradients that are not scaled yet.
            ValueError: there are not as many targets as hidden states.
            IndexError: a target is no word; on a GPU, an assertion on the device.
        """
        return self._compute(hidden, weight, targets, rows, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the same losses and, in the same pass, the ranks int64 [...] of the targets.

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`.
        """
        return self._compute(hidden, weight, targets, rows, ranked=True)

    def _compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        hidden, weight = autocast_operands(hidden, weight)
        check_operands("linear_cross_entropy", hidden, weight, targets)
        if hidden.dtype == torch.float16:
            raise TypeError(
                "linear_cross_entropy.triton_sum_narrow: gradients of a sum over all tokens may be too large for "
                "torch.float16; train in bfloat16, or name triton_sum"
            )
        rows = narrow_rows(hidden, weight) if rows is None else rows
        recorded = torch.is_grad_enabled()
        of_hidden, of_weight = recorded and hidden.requires_grad, recorded and weight.requires_grad
        if of_hidden or of_weight:
            losses, ranks, *_ = narrow.token_losses_narrow(hidden, weight, targets, rows, ranked, of_hidden, of_weight)
        else:
            losses, ranks, *_ = token_losses(hidden, weight, targets, rows, 0, ranked)
        return losses, ranks


class LinearCrossEntropyByWords:
    """Triton backend (words) of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy` in memory for few logits.

    Four matrix products and two passes over the logits, in chunks of words. From forward to backward live the logits of
    the last chunk, in memory that the backward needs anyway, and three numbers for each token. The backward computes
    the logits of the other chunks again, writes the weight's gradient chunk by chunk in its own dtype, and sums that of
    the hidden states in float32. Which loss the tokens' losses become makes no difference.

    Where the weight needs no gradient, chunks of tokens need no product twice: below a frozen weight the forward
    computes the gradient of the hidden states, as ``triton`` does, and without gradients there is but one product.
    """

    def __init__(self) -> None:
        self._by_tokens = LinearCrossEntropy()

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, size: int | None = None, keep: bool = True
    ) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H].
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` where nothing is predicted.
            size: largest W; ``None`` chooses by T.
            keep: whether to keep the last chunk's logits for the backward, which overwrites them: walking a graph twice
                (``retain_graph``) is an error of autograd's then.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, whatever the hidden state is.

        Raises:
            TypeError: the kernels do not read the dtype, or hidden and weight have two.
            ValueError: there are not as many targets as hidden states.
            IndexError: a target is no word; on a GPU, an assertion on the device.
        """
        return self._compute(hidden, weight, targets, size, keep, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, size: int | None = None, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute the same losses, and the ranks int64 [...] of the targets.

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`. If the weight needs a gradient,
        that is one product more: the logit of the target is known only after all words.
        """
        return self._compute(hidden, weight, targets, size, keep, ranked=True)

    def _compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, size: int | None, keep: bool, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        hidden, weight = autocast_operands(hidden, weight)
        check_operands("linear_cross_entropy", hidden, weight, targets)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            rows = max(_LEAST_ROWS, _fitting(columns(weight.shape[0]), hidden))
            return self._by_tokens.compute(hidden, weight, targets, rows, False, ranked=ranked)
        size = max(_LEAST_WORDS, _fitting(max(1, targets.numel()), hidden)) if size is None else size
        losses, ranks, *_ = token_losses_by_words(hidden, weight, targets, size, keep, ranked)
        return losses, ranks


def _fitting(length: int, hidden: Tensor) -> int:
    """Size of a small chunk in the other dimension: times that ``size`` logits fit, in whole tiles."""
    return _SMALL_BYTES // (length * hidden.itemsize) // TILE * TILE


def rows_of_chunk(hidden: Tensor, size: int) -> int:
    """Largest C for rows of ``size`` logits."""
    return max(_LEAST_ROWS, _CHUNK_BYTES // (size * hidden.itemsize))


def narrow_rows(hidden: Tensor, weight: Tensor) -> int:
    """Largest C for chunks that need memory for little more than their logits."""
    row = (columns(weight.shape[0]) + weight.shape[1]) * hidden.itemsize
    return max(_LEAST_ROWS, _NARROW_BYTES // row // narrow.TILE * narrow.TILE)


def check_operands(op: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Refuse what the products and the kernels of an op do not read.

    Raises:
        TypeError: the kernels do not read the dtype, or hidden and weight have two.
        ValueError: there are not as many targets as hidden states.
    """
    check_floats(op, hidden=hidden, weight=weight)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{op}.triton: hidden is {hidden.dtype}, weight {weight.dtype}; the matrix product reads "
            "one dtype: cast one of them, or train under autocast"
        )
    if hidden.shape[:-1].numel() != targets.numel():
        shapes = f"hidden {list(hidden.shape)} and targets {list(targets.shape)}"
        raise ValueError(f"{op}.triton: {shapes} must have one shape but for the features")
