"""Backend ``liger`` of the op ``linear_cross_entropy``.

Shapes: T tokens, H features, V vocabulary size.
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
    """Build the backend ``liger`` of the op ``linear_cross_entropy``; its function is the same for every signature."""
    return linear_cross_entropy


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Linear cross-entropy by Liger, see :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    Exact for any function of the losses: the library computes only losses in the forward, and recomputes the logits in
    the backward, when the gradient of each token's loss is known. Both wait for the device to count the tokens with a
    target.

    Args:
        hidden: [..., H].
        weight: [V, H], of the same dtype.
        targets: int64 [...]; :data:`~d9d_nn.ops.linear_cross_entropy.IGNORE` for tokens without a target.

    Returns:
        float32 [...]; zero, with zero gradient, where the target is ``IGNORE``, even if the hidden state is NaN.
    """
    hidden, weight = autocast_operands(hidden, weight)
    if not targets.numel():  # nothing to launch
        return reference(hidden, weight, targets)
    # Zeroed, because zero times NaN is NaN, also in the weight gradient.
    tokens = hidden.masked_fill((targets == IGNORE).unsqueeze(-1), 0).flatten(0, -2)
    losses: Tensor
    losses, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        tokens,
        weight,
        targets.flatten(),
        None,  # bias
        None,  # weights of the vocabulary entries
        IGNORE,
        0.0,  # coefficient of the z-loss
        0.0,  # label smoothing
        "none",
        None,  # softcap
        False,  # whether to return the z-loss
        torch.float32,  # dtype in which chunks add up the weight gradient
    )
    return losses.view(targets.shape)
