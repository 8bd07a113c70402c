"""Backends ``cce`` and ``cce_filtered`` of the op ``linear_cross_entropy`` (Wijmans et al. 2024, "Cut Your Losses").

Shapes: T tokens, H features, V vocabulary size.
"""

from __future__ import annotations

import torch
from cut_cross_entropy.cce import CCEParams, linear_cross_entropy_apply
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy
from torch import Tensor


def build(_signature: OpSignature) -> CutCrossEntropy:
    """Build the backend ``cce`` of the op ``linear_cross_entropy``."""
    return CutCrossEntropy()


def build_filtered(_signature: OpSignature) -> CutCrossEntropy:
    """Build the backend ``cce_filtered`` of the op ``linear_cross_entropy``."""
    return CutCrossEntropy(filtered=True)


class CutCrossEntropy:
    """Cut Cross-Entropy (CCE) backend of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    The library's own function first searches for tokens without a target, which makes the host wait for the device. So
    this backend calls the library's internal functions with all tokens: tokens without a target cost as much as other
    tokens.

    Args:
        filtered: skip the gradient of a tile of logits if all its probabilities are below a threshold (section 4.3 of
            the paper): the precision of the dtype divided by 32. The vocabulary is sorted by mean logits for this.
    """

    def __init__(self, *, filtered: bool = False) -> None:
        self._filtered = filtered

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H], bfloat16 or float16.
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` for tokens without a target.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, even if the hidden state is NaN.
        """
        hidden, weight = autocast_operands(hidden, weight)
        if not targets.numel():  # nothing to launch
            return linear_cross_entropy(hidden, weight, targets)
        unpredicted = (targets == IGNORE).flatten()
        # Hidden states without a target are zeroed: their gradient is zero, and zero times a NaN would be NaN in the
        # weight gradient.
        tokens = hidden.flatten(0, -2).masked_fill(unpredicted.unsqueeze(1), 0)
        parameters = CCEParams(
            targets=targets.flatten().masked_fill(unpredicted, 0),
            valids=None,
            softcap=None,
            reduction="none",
            filter_eps=torch.finfo(tokens.dtype).eps / 32 if self._filtered else None,
            shift=False,
            batch_shape=unpredicted.shape,
        )
        losses: Tensor = linear_cross_entropy_apply(tokens, weight.contiguous(), parameters)
        return losses.masked_fill(unpredicted, 0).view(targets.shape)
