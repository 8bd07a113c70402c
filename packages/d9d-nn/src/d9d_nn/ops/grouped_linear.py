"""Op ``grouped_linear``: each expert's rows times that expert's matrix.

Shapes: R rows, E experts, I features in, O features out. The slot's static facts are ``in_features``,
``out_features`` and ``experts``.
"""

from __future__ import annotations

import torch
from d9d_core.deferral import Deferral
from torch import Tensor

from d9d_nn.ops.deferred import Product, may_defer, product


def grouped_linear(
    x: Tensor, bank: Tensor, counts: Tensor, *, spare_rows: bool = True, deferral: Deferral | None = None
) -> Tensor:
    """Reference of grouped linear: loops over experts, ``out[rows of e] = x[rows of e] @ bank[e]``.

    The host waits for the counts. An expert without rows has a gradient of zeros. Under autocast the product is
    computed in autocast's dtype.

    Args:
        x: [R, I], sorted by expert: rows of expert 0 first.
        bank: [E, I, O], the matrices of all experts.
        counts: int32 or int64 [E] on the device of ``x``, rows of each expert; not negative.
        spare_rows: whether there may be rows beyond the sum of counts. Spare rows belong to no expert, and their output
            and gradient are zeros, whatever their content. ``False`` promises that there are no spare rows, so that
            backends need not clear them.
        deferral: deferral of weight gradients; while it is active, a backend may defer the gradient of ``bank``.

    Returns:
        [R, O].

    Raises:
        ValueError: counts add up to more than R, or to less without spare rows. Backends that keep counts on the device
            cannot check this.
    """
    x, bank = autocast_operands(x, bank)
    sizes = counts.tolist()
    spare = len(x) - sum(sizes)
    if spare < 0 or (spare and not spare_rows):
        raise ValueError(
            f"grouped_linear: counts add up to {sum(sizes)}, but there are {len(x)} rows; "
            "sort rows by expert and count each once, or pass spare_rows=True if the last rows belong to no expert"
        )
    split = [*sizes, spare]
    if may_defer(bank, deferral):
        assert deferral is not None
        return product(x, bank, deferral, _by_expert(split))
    return _multiply(x, bank, split)


def _multiply(x: Tensor, bank: Tensor, split: list[int]) -> Tensor:
    *rows, nobody = torch.split(x, split)
    # unbind() instead of bank[e], because the gradient of each index would be a tensor as large as the whole bank.
    parts = [part @ matrix for part, matrix in zip(rows, bank.unbind(0), strict=True)]
    return torch.cat([*parts, x.new_zeros(len(nobody), bank.shape[2])])


def _by_expert(split: list[int]) -> Product:
    def bank_gradient(x: Tensor, grad: Tensor) -> Tensor:
        pairs = zip(torch.split(x, split)[:-1], torch.split(grad, split)[:-1], strict=True)
        return torch.stack([rows.mT @ part for rows, part in pairs])

    return Product(
        forward=lambda x, bank: _multiply(x, bank, split),
        rows_gradient=lambda grad, bank: _multiply(grad, bank.mT, split),
        weight_gradient=bank_gradient,
    )


def autocast_operands(x: Tensor, bank: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both operands as autocast does for a linear layer; torch's autocast does not cast for custom ops."""
    device = x.device.type
    # The meta device has no autocast. (torch 2.11 cannot compile is_autocast_available, which would check this.)
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), bank.to(dtype)
    return x, bank


def boundaries(x: Tensor, counts: Tensor, *, spare_rows: bool) -> tuple[Tensor, Tensor | None]:
    """Ends int32 [E] of the experts' rows, and bool [R, 1] of the rows past the last end, where kernels write nothing.

    Args:
        x: [R, I].
        counts: [E], rows of each expert.
        spare_rows: whether there may be rows past the last end; if not, the second result is ``None``.
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    return ends, (torch.arange(len(x), device=x.device) >= ends[-1]).unsqueeze(1) if spare_rows else None


def packed(rows: Tensor) -> Tensor:
    """Contiguous rows. Torch treats any tensor without elements as contiguous, but its kernel checks the strides."""
    return rows.contiguous() if len(rows) else rows.clone(memory_format=torch.contiguous_format)


def clear(rows: Tensor, spare: Tensor | None) -> Tensor:
    """Rows [R, ...] with zeros where ``spare`` bool [R, 1] is true."""
    # Not in place, because gradients would then be zeros under torch 2.11's compiler.
    return rows if spare is None else rows.masked_fill(spare, 0)
