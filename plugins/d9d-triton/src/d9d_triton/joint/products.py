"""Matrix products of rows with several weights at once; the weights may be adjacent in memory.

Shapes: R rows, H features of the input, F features of all results together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from d9d_core.custom_op import CustomOp
from torch import Tensor


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate weights [F_i, ...] along dimension 0 to [F, ...]: a view if they are adjacent in memory, else a copy.

    See :class:`d9d_core.traits.HasAdjacentWeights`. Reads memory addresses, so a compiler cannot trace it.
    """
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        beside = weight.data_ptr() == end and weight.is_contiguous()
        if not beside or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(weights))
        end += weight.nbytes
    rows = sum(map(len, weights))
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


@CustomOp.define("d9d_triton::joint_rows_gradient")
def joint_rows_gradient(grad: Tensor, weights: list[Tensor]) -> Tensor:
    """Gradient of the rows that several projections read, in one product with the concatenated weights.

    Args:
        grad: [R, F], gradients of all outputs, concatenated.
        weights: [F_i, H] each; together they have F rows.

    Returns:
        [R, H].
    """
    return grad.mm(stacked(weights))


@joint_rows_gradient.register_fake
def _fake(grad: Tensor, weights: list[Tensor]) -> Tensor:
    return grad.new_empty(grad.shape[0], weights[0].shape[1])
