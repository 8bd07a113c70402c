"""Backends of the op ``linear_cross_entropy``: ``triton``, ``triton_sum``, ``triton_sum_narrow`` and ``triton_words``.

Shapes: T tokens, H features, V vocabulary size, C tokens of a chunk, W vocabulary entries of a chunk.
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

#: Largest size of a chunk's logits in bytes. Each chunk after the first costs two passes over the float32 weight
#: gradient, so few large chunks are faster.
_CHUNK_BYTES = 1 << 30
#: Smallest number of tokens of a chunk.
_LEAST_ROWS = 256
#: Largest size of the logits of a chunk in ``triton_words``, in bytes. Each chunk of the vocabulary costs two passes
#: over the float32 gradient of the hidden states, so it has at least ``_LEAST_WORDS`` entries, whatever this size is.
_SMALL_BYTES = 192 << 20
_LEAST_WORDS = 4096
#: Largest size in bytes of a chunk of tokens in the narrow backend: its logits, and its hidden states with ignored rows
#: zeroed. For 2,048 features and 151,936 vocabulary entries in bfloat16, 1,024 tokens fit.
_NARROW_BYTES = 304 << 20


def build(_signature: OpSignature) -> LinearCrossEntropy:
    """Build the backend ``triton`` of the op ``linear_cross_entropy``."""
    return LinearCrossEntropy()


def build_sum(_signature: OpSignature) -> LinearCrossEntropy:
    """Build the backend ``triton_sum`` of the op ``linear_cross_entropy``."""
    return LinearCrossEntropy(ahead=True)


def build_sum_narrow(_signature: OpSignature) -> LinearCrossEntropyNarrow:
    """Build the backend ``triton_sum_narrow`` of the op ``linear_cross_entropy``."""
    return LinearCrossEntropyNarrow()


def build_words(_signature: OpSignature) -> LinearCrossEntropyByWords:
    """Build the backend ``triton_words`` of the op ``linear_cross_entropy``."""
    return LinearCrossEntropyByWords()


class LinearCrossEntropy:
    """Triton backend of linear cross-entropy, see :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    It makes three matrix products and two passes over the logits. As many logits as :func:`may_be_kept` allows are kept
    for the backward, which recomputes the logits of the other tokens. The backward overwrites kept logits with their
    gradient, so a second backward (``retain_graph``) is an autograd error, unless ``keep=False``.

    If the weight is frozen, the forward computes the gradient of the hidden states, chunk by chunk, and keeps no
    logits; the backward multiplies each row of this gradient by the gradient of the row's loss.

    Args:
        ahead: also compute the weight gradient in the forward, assuming that the loss is a constant times the sum of
            all tokens' losses. The backward checks this without a device sync: the gradient of a sum is an expanded
            tensor of one element. For any other loss the backward recomputes the gradients, with three more products.
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
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` for tokens without a target.
            rows: largest number of tokens in a chunk; ``None`` chooses it by V.
            keep: whether to keep all logits or none; ``None`` keeps as many as
                :func:`~d9d_nn.ops.linear_cross_entropy.may_be_kept` allows. Without effect if the forward computes the
                gradients.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, even if the hidden state is NaN.

        Raises:
            TypeError: the kernels do not support the dtype, or hidden and weight differ in dtype.
            ValueError: the numbers of targets and hidden states differ.
            IndexError: a target is outside of the vocabulary; on a GPU, a device-side assertion.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None, keep: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses and, in the same pass, how many logits exceed each target's logit (ranks), int64 [...].

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`.
        """
        return self.compute(hidden, weight, targets, rows, keep, ranked=True)

    def compute(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None, keep: bool | None, *, ranked: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and, if ``ranked``, how many logits exceed each target's logit, else an empty tensor."""
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
    """Backend ``triton_sum_narrow`` of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    As ``triton_sum``, the forward computes the gradients, assuming a loss that is a constant times the sum of all
    tokens' losses, and the backward recomputes everything for any other loss. But the gradients are computed, added and
    scaled in the memory that the backward returns, and chunks of tokens are small. So a second backward
    (``retain_graph``) is an autograd error.

    Gradients in bfloat16 are less exact: they are rounded before they are scaled, and the weight gradient is rounded
    after each chunk. With N chunks whose contributions have random signs, its error is ``sqrt((N + 1) / 2)`` times the
    error of one rounding (2.1 times for N = 8), and an addend below half a unit in the last place of the sum is lost.
    Softmax statistics and the sums inside a product are float32, and all gradients are computed, however small. With
    float32 weight and hidden states the accuracy equals ``triton_sum``.
    """

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H], bfloat16 or float32.
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` for tokens without a target.
            rows: largest number of tokens in a chunk; ``None`` chooses it by V and H.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, even if the hidden state is NaN.

        Raises:
            TypeError: the dtype is not supported, or hidden and weight differ in dtype. Of the narrow dtypes only
                bfloat16 has the range of float32, which gradients need before they are scaled.
            ValueError: the numbers of targets and hidden states differ.
            IndexError: a target is outside of the vocabulary; on a GPU, a device-side assertion.
        """
        return self._compute(hidden, weight, targets, rows, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses and, in the same pass, how many logits exceed each target's logit (ranks), int64 [...].

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
                "torch.float16; train in bfloat16, or choose triton_sum in kernels.linear_cross_entropy"
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
    """Backend ``triton_words`` of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`, in vocabulary chunks.

    It makes four matrix products and two passes over the logits, in chunks of the vocabulary. Between forward and
    backward it keeps the logits of the last chunk, in memory that the backward needs anyway, and three numbers for each
    token. The backward recomputes the logits of the other chunks, writes the weight gradient chunk by chunk in its own
    dtype, and sums the gradient of the hidden states in float32. It supports any function of the tokens' losses.

    If the weight needs no gradient, it uses chunks of tokens and recomputes no logits: with a frozen weight the forward
    computes the gradient of the hidden states, as ``triton`` does; without any gradients there is only one product.
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
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` for tokens without a target.
            size: largest number of vocabulary entries in a chunk, W; ``None`` chooses it by T.
            keep: whether to keep the last chunk's logits for the backward, which overwrites them; a second backward
                (``retain_graph``) is then an autograd error.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, even if the hidden state is NaN.

        Raises:
            TypeError: the kernels do not support the dtype, or hidden and weight differ in dtype.
            ValueError: the numbers of targets and hidden states differ.
            IndexError: a target is outside of the vocabulary; on a GPU, a device-side assertion.
        """
        return self._compute(hidden, weight, targets, size, keep, ranked=False)[0]

    def with_ranks(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, size: int | None = None, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses, and how many logits exceed each target's logit (ranks), int64 [...].

        See :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`. If the weight needs a gradient,
        ranks cost one more product, because the target's logit is known only after the last chunk of the vocabulary;
        then no logits are kept.
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
    """Largest chunk whose logits [``length``, chunk] fit into a chunk's memory, rounded down to whole tiles."""
    return _SMALL_BYTES // (length * hidden.itemsize) // TILE * TILE


def rows_of_chunk(hidden: Tensor, size: int) -> int:
    """Number of tokens of a chunk with ``size`` logits per token: as many as a chunk's memory holds, at least 256."""
    return max(_LEAST_ROWS, _CHUNK_BYTES // (size * hidden.itemsize))


def narrow_rows(hidden: Tensor, weight: Tensor) -> int:
    """Largest chunk C, in tokens, of ``triton_sum_narrow``, whose chunks need memory for logits and hidden states."""
    row = (columns(weight.shape[0]) + weight.shape[1]) * hidden.itemsize
    return max(_LEAST_ROWS, _NARROW_BYTES // row // narrow.TILE * narrow.TILE)


def check_operands(op: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raise an error for operands that the matrix products and kernels of an op cannot read.

    Raises:
        TypeError: the kernels do not support the dtype, or hidden and weight differ in dtype.
        ValueError: the numbers of targets and hidden states differ.
    """
    check_floats(op, hidden=hidden, weight=weight)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{op}.triton: hidden is {hidden.dtype}, weight {weight.dtype}; the matrix product reads "
            "one dtype: cast one of them, or train under autocast"
        )
    if hidden.shape[:-1].numel() != targets.numel():
        shapes = f"hidden {list(hidden.shape)} and targets {list(targets.shape)}"
        raise ValueError(f"{op}.triton: {shapes} must agree in all dimensions but the features of hidden")
