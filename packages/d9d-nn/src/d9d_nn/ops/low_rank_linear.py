"""Op ``low_rank_linear``: linear layers that read the same input, each with a low-rank update (LoRA).

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. A kernel can multiply the input by
all factors A in one product, add a layer's product to its update without a separate pass over memory, and add up the
gradient of the input in place. Backends read the slot's static facts ``inputs``, ``features`` and ``rank`` of one
layer; a call may contain further layers.

Shapes: I features of the input, O features of an output, r rank, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def low_rank_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    scales: Sequence[float],
) -> tuple[Tensor, ...]:
    """Reference of linear layers with low-rank updates: ``x W^T + bias + scale * (x A^T) B^T`` for each layer.

    Args:
        x: [..., I].
        weights: W of each layer, [O, I]; O may differ.
        biases: bias of each layer, [O], or ``None``.
        downs: A of each layer, [r, I]; r may differ.
        ups: B of each layer, [O, r].
        scales: factor of each update.

    Returns:
        [..., O] for each layer, in the dtype of ``x``.
    """
    layers = zip(weights, biases, downs, ups, scales, strict=True)
    return tuple(
        functional.linear(x, weight, bias) + functional.linear(functional.linear(x, down), up) * scale
        for weight, bias, down, up, scale in layers
    )
