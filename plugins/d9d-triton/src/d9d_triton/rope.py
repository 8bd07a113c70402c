"""Backend of the op ``rope``: rotates queries and keys in one launch, and their gradients in the backward.

Only the angles are kept for the backward, which rotates the gradients by the opposite angles.

Shapes: B samples, S positions, N query heads, K key heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from d9d_nn.ops.rope import rope as reference
from torch import Tensor

from d9d_triton.kernels.rope import rotate
from d9d_triton.launch import OPTIONS, cdiv, check_floats, empty_like, next_power_of_2

#: Number of feature pairs of queries, and also of keys, that a program rotates.
_PAIRS = 2048


def build(_signature: OpSignature) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the backend ``triton`` of the op ``rope``; its function is the same for every signature."""
    return rope


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE by Triton: rotate queries and keys, see :func:`d9d_nn.ops.rope.rope`; in float32, rounded once.

    ``cos`` or ``sin`` that need gradients go through the reference implementation, which computes them.

    Args:
        query: [B, S, N, D], of any strides.
        key: [B, S, K, D].
        cos: [B or 1, S, D/2].
        sin: [B or 1, S, D/2].

    Returns:
        Rotated query and key in their dtypes, contiguous.

    Raises:
        TypeError: the kernel does not support the dtype of a tensor.
        ValueError: the shapes do not match.
    """
    trained = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    turned: tuple[Tensor, Tensor] = reference(query, key, cos, sin) if trained else turn(query, key, cos, sin, False)
    return turned


@CustomOp.define("d9d_triton::rope")
def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Custom op behind :func:`rope`; computes no gradients of ``cos`` and ``sin``.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        cos: [B or 1, S, D/2].
        sin: [B or 1, S, D/2].
        back: rotate by the opposite angles, as the backward does.
    """
    check_floats("rope", query=query, key=key, cos=cos, sin=sin)
    _check_shapes(query, key, cos, sin)
    samples, positions, query_heads, features = query.shape
    key_heads, half = key.shape[2], features // 2
    turned = empty_like(query), empty_like(key)
    if not samples * positions:
        return turned
    width = next_power_of_2(half)
    most = max(1, _PAIRS // width)
    query_block, key_block = (min(most, next_power_of_2(max(1, heads))) for heads in (query_heads, key_heads))
    groups = max(cdiv(query_heads, query_block), cdiv(key_heads, key_block))
    angles = [tensor.expand(samples, positions, half) for tensor in (cos, sin)]
    rotate[(samples * positions, groups)](
        *turned, query, key, *angles, positions, query_heads, key_heads, half,
        *query.stride(), *key.stride(), *angles[0].stride(), *angles[1].stride(),
        QUERY_HEADS=query_block, KEY_HEADS=key_block, PAIRS=width, BACK=back, **OPTIONS,
    )  # fmt: skip
    return turned


def _check_shapes(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise an error for shapes that would make the kernel read or write outside of a tensor."""
    samples, positions, _, features = query.shape
    angles = {(count, positions, features // 2) for count in (1, samples)}
    same = (*key.shape[:2], key.shape[3]) == (samples, positions, features)
    if not same or features % 2 or tuple(cos.shape) not in angles or tuple(sin.shape) not in angles:
        shapes = ", ".join(
            f"{name} {list(tensor.shape)}"
            for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin))
        )
        raise ValueError(
            f"rope.triton: {shapes}; query must be [B, S, N, D], key [B, S, K, D], cos and sin [B or 1, S, D/2], D even"
        )


@turn.register_fake
def _fake(query: Tensor, key: Tensor, _cos: Tensor, _sin: Tensor, _back: bool) -> tuple[Tensor, Tensor]:
    return empty_like(query), empty_like(key)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, bool], output: Any) -> None:  # noqa: ARG001
    _, _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
    grads = turn(grad_query, grad_key, *ctx.saved_tensors, not ctx.back)
    return *grads, None, None, None


turn.register_autograd(_backward, setup_context=_keep)
