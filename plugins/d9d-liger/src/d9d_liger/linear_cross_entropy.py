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

    Gradients are exact for any function of the losses: the forward computes only losses, and the backward, which knows
    the gradient of each token's loss, recomputes the logits. In both, the library counts the tokens with a target, for
    which the host waits.

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
    # Hidden states without a target are zeroed: their gradient is zero, and zero times a NaN would be NaN in the
    # weight gradient.
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
        torch.float32,  # dtype in which the weight gradients of chunks are summed
    )
    return losses.view(targets.shape)
