"""Backend ``liger`` of the op ``rope``.

The library rotates in place, also in its backward, so this backend passes copies.

Shapes: B samples, S positions, N query heads, K key heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from liger_kernel.ops import rope_backward, rope_forward
from torch import Tensor


def build(_signature: OpSignature) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the backend ``liger`` of the op ``rope``; its function is the same for every signature."""
    return rope


@CustomOp.define("d9d_liger::rope")
def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, see :func:`d9d_nn.ops.rope.rope`. The angles get no gradient.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        cos: float32 [B or 1, S, D/2], cosine of the angle of each pair.
        sin: float32 [B or 1, S, D/2].

    Returns:
        Rotated query and key, contiguous, in their dtypes.
    """
    return _rotate(rope_forward, query, key, cos, sin)


@CustomOp.define("d9d_liger::rope_backward")
def backward(grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of query and key, contiguous, from the outputs' gradients, which may have any strides."""
    return _rotate(rope_backward, grad_query, grad_key, cos, sin)


def _rotate(
    library: Callable[..., tuple[Tensor, ...]], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key))
    if query.numel():
        # The library expects heads before positions. ``rotary_dim``: cos and sin have half as many features as a head.
        library(query.transpose(1, 2), key.transpose(1, 2), cos, sin, rotary_dim=query.shape[-1])
    return query, key


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@rope.register_fake
def _fake(query: Tensor, key: Tensor, _cos: Tensor, _sin: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous_like(query), _contiguous_like(key)


@backward.register_fake
def _fake_backward(grad_query: Tensor, grad_key: Tensor, _cos: Tensor, _sin: Tensor) -> tuple[Tensor, Tensor]:
    return _contiguous_like(grad_query), _contiguous_like(grad_key)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001 - torch's
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
    grads = backward(grad_query, grad_key, *ctx.saved_tensors)
    return *(one if ctx.needs_input_grad[place] else None for place, one in enumerate(grads)), None, None


rope.register_autograd(_backward, setup_context=_keep)
