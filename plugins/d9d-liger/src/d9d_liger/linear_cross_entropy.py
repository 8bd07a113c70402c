"""Backend ``liger`` of the op ``linear_cross_entropy``.

Shapes: T tokens, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import autocast_operands
from d9d_nn.ops.linear_cross_entropy import IGNORE
from d9d_nn.ops.linear_cross_entropy import linear_cross_entropy as reference
from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction
from torch import Tensor


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Backend function; it is the same for all signatures."""
    return linear_cross_entropy


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Linear cross-entropy by Liger, see :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    Exact for any gradient of the losses: the library computes nothing but losses first, and in the backward the logits
    again, with the gradient of each token at hand. In both it asks the device how many tokens have a target.

    Args:
        hidden: [..., H].
        weight: [V, H], of the same dtype.
        targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` where nothing is predicted.

    Returns:
        float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, whatever the hidden state is.
    """
    hidden, weight = autocast_operands(hidden, weight)
    if not targets.numel():  # nothing to launch
        return reference(hidden, weight, targets)
    # Zero times NaN is NaN, in the gradient of the weight, too.
    tokens = hidden.masked_fill((targets == IGNORE).unsqueeze(-1), 0).flatten(0, -2)
    losses: Tensor
    losses, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        tokens,
        weight,
        targets.flatten(),
        None,  # bias
        None,  # weights of words
        IGNORE,
        0.0,  # coefficient of the z-loss
        0.0,  # label smoothing
        "none",
        None,  # softcap
        False,  # whether to return the z-loss
        torch.float32,  # in which the gradient of the weight is summed over chunks
    )
    return losses.view(targets.shape)
