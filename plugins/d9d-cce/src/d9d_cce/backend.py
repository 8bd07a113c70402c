"""Backends ``cce`` and ``cce_filtered`` of the op ``linear_cross_entropy`` (Wijmans et al. 2024, "Cut Your Losses").

Shapes: T tokens, H features, V words of the vocabulary.
"""

from __future__ import annotations

import torch
from cut_cross_entropy.cce import CCEParams, linear_cross_entropy_apply
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy
from torch import Tensor


def build(_signature: OpSignature) -> CutCrossEntropy:
    """Backend function of ``cce``; it is the same for all signatures."""
    return CutCrossEntropy()


def build_filtered(_signature: OpSignature) -> CutCrossEntropy:
    """Backend function of ``cce_filtered``; it is the same for all signatures."""
    return CutCrossEntropy(filtered=True)


class CutCrossEntropy:
    """Cut Cross-Entropy (CCE) backend of :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    The library's own function looks for tokens without a target first, and waits for the device to count them. What it
    calls then is called here instead, with all tokens: those without a target cost what others do.

    Args:
        filtered: leave out gradients of logits where no probability of a tile is above a threshold (section 4.3 of the
            paper), which is the dtype's precision by 32; the vocabulary is sorted by mean logits for it.
    """

    def __init__(self, *, filtered: bool = False) -> None:
        self._filtered = filtered

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each token.

        Args:
            hidden: [..., H], bfloat16 or float16.
            weight: [V, H], of the same dtype.
            targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` where nothing is predicted.

        Returns:
            float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, whatever the hidden state is.
        """
        hidden, weight = autocast_operands(hidden, weight)
        if not targets.numel():  # nothing to launch
            return linear_cross_entropy(hidden, weight, targets)
        unpredicted = (targets == IGNORE).flatten()
        # Zero times NaN is NaN, in the gradient of the weight, too.
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
