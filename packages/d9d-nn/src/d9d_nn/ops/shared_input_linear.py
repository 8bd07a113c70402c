"""Op ``shared_input_linear``: linear layers that read the same input, such as query, key and value.

The gradient of their input is a sum of one product for each. The reference leaves that sum to autograd, which adds
whole products in passes over memory; the backend ``accumulated`` has each product added to the sum as it is computed.
The slot's static facts are ``in_features``, and ``out_features`` of each layer.

Shapes: T rows, I features in, O features out of one layer, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from d9d_core.extend import Decision, OpSignature
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

#: Priority and reason of the backend ``accumulated`` on CUDA, to be changed here when a measurement says so; 0 is by
#: name only. Predicted for a dense step of 341 ms on an H200: 3 ms less, 2 of them left under its limit of power.
ACCUMULATED = (0, "no pass over memory to add gradients of the input; not measured on a GPU yet, by name only")
_FLOATS = ("float64", "float32", "bfloat16", "float16")


def shared_input_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Reference: :func:`torch.nn.functional.linear` for each weight.

    Args:
        x: [..., I].
        weights: [O, I] each, in the dtype of ``x``.
        biases: [O] for each weight; ``None`` for none.

    Returns:
        [..., O] for each weight.
    """
    return tuple(functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def accumulated_supports(signature: OpSignature) -> Decision:
    """Accept floating-point products on any device."""
    if signature.dtype not in _FLOATS:
        return Decision(accept=False, reason=f"multiplies {', '.join(_FLOATS)}; the tensors are {signature.dtype}")
    if signature.device != "cuda":
        return Decision(accept=True, reason="measured for CUDA alone; by name only", priority=0)
    priority, reason = ACCUMULATED
    return Decision(accept=True, reason=reason, priority=priority)


def accumulated_build(_signature: OpSignature) -> Callable[..., tuple[Tensor, ...]]:
    """Backend function; it is the same for all signatures."""
    return accumulated


def accumulated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Linear layers of one input, see :func:`shared_input_linear`, whose products add up the gradient of the input.

    Outputs and gradients of weights are those of the reference, bit for bit. The gradient of the input is rounded to
    its dtype after each product, as autograd's sum in that dtype is; that of an unused output's weight is zero. Without
    second derivatives.

    Args:
        x: [..., I].
        weights: [O, I] each, in the dtype of ``x``.
        biases: [O] for each weight; ``None`` for none.

    Returns:
        [..., O] for each weight.

    Raises:
        ValueError: another number of biases than of weights.
    """
    if len(weights) != len(biases):
        raise ValueError(
            f"shared_input_linear.accumulated: {len(weights)} weights and {len(biases)} biases; give None for none"
        )
    outs: tuple[Tensor, ...] = _Accumulated.apply(x, *weights, *biases)
    return outs


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *terms: Tensor | None) -> tuple[Tensor, ...]:
        """Outputs of all layers; ``terms`` are all weights, then all biases."""
        count = len(terms) // 2
        ctx.save_for_backward(x, *terms[:count])
        outs = []
        for weight, bias in zip(terms[:count], terms[count:], strict=True):
            assert weight is not None
            outs.append(functional.linear(x, weight, bias))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1:]
        rows, flat = _flat(x), [_flat(grad) for grad in grads]
        # As torch has it for x @ weight.T, so that it is the same bit for bit. Before the sum: inductor has what these
        # products read in memory once, and the sum reads that; in the other order it writes it again for them.
        of_weights = [grad.t().mm(rows) if need else None for grad, need in zip(flat, needs[: len(flat)], strict=True)]
        of_x = sum_of_products(flat, weights).view(x.shape) if needs_x else None
        of_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs[len(flat) :], strict=True)]
        return of_x, *of_weights, *of_biases


# An op of its own, because a compiler makes functional code of a product that is added in place: inductor would have
# the sum copied into new memory before each product, a pass like the one that is saved.
@torch.library.custom_op("d9d_nn::sum_of_products", mutates_args=())
def sum_of_products(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Sum of ``rows[i] @ weights[i]``, rounded after each product. Not recorded by autograd.

    Args:
        rows: [T, O] each, in one dtype; O may differ.
        weights: [O, I] for each of ``rows``, in their dtype.

    Returns:
        [T, I].
    """
    total: Tensor = _empty(rows, weights)
    # Autocast leaves products alone that are told where to write.
    torch.mm(rows[0], weights[0], out=total)
    for more, weight in zip(rows[1:], weights[1:], strict=True):
        torch.addmm(total, more, weight, out=total)
    return total


@sum_of_products.register_fake
def _empty(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    total: Tensor = rows[0].new_empty(rows[0].shape[0], weights[0].shape[1])
    return total


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
