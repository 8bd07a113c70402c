"""Backend of the op ``normed_rope``: head norms and rotations of queries and keys in one pass over memory each way.

Only the inputs are kept for the backward, which has whole heads in registers and recomputes their root mean squares.
Each program sums the weight gradients over its tokens; the sums of the programs are then added in a fixed order.

Shapes: B samples, S positions, N query heads, K key heads, D features of a head, P programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from d9d_core.custom_op import CustomOp
from d9d_core.kernel import OpSignature
from d9d_nn.ops.normed_rope import normed_rope as reference
from torch import Tensor

from d9d_triton.column_sums import sums_of_two
from d9d_triton.kernels.normed_rope import differentiate, norm_and_rotate
from d9d_triton.launch import OPTIONS, WARP, cdiv, check_floats, empty_like, next_power_of_2, persistent_programs

#: Number of warps of a program, and of feature pairs of each thread: as many 16-bit values as a thread loads at once.
_WARPS, _PAIRS_EACH = 2, 8
#: Number of the backward's programs per multiprocessor: as many as fit into its registers.
_PROGRAMS_EACH = 8
#: Largest number of heads of a program; its code is unrolled over the heads.
_HEADS = 4


def build(_signature: OpSignature) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the backend ``triton`` of the op ``normed_rope``; its function is the same for every signature."""
    return normed_rope


def normed_rope(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normed RoPE by Triton, see :func:`d9d_nn.ops.normed_rope.normed_rope`; in float32, rounded once.

    ``cos`` or ``sin`` that need gradients go through the reference implementation, which computes them.

    Args:
        query: [B, S, N, D]; copied unless samples and positions can be merged into one dimension.
        key: [B, S, K, D].
        query_weight: [D].
        key_weight: [D].
        cos: [B or 1, S, D/2].
        sin: [B or 1, S, D/2].
        eps: added to the mean square.

    Returns:
        Query and key in their dtypes, contiguous.

    Raises:
        TypeError: the kernel does not support the dtype of a tensor.
        ValueError: the shapes do not match.
    """
    arguments = query, key, query_weight, key_weight, cos, sin, eps
    trained = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    found: tuple[Tensor, Tensor] = reference(*arguments) if trained else forward(*arguments)
    return found


@CustomOp.define("d9d_triton::normed_rope")
def forward(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Custom op behind :func:`normed_rope`; computes no gradients of ``cos`` and ``sin``."""
    _check(query, key, query_weight, key_weight, cos, sin)
    out = empty_like(query), empty_like(key)
    samples, positions, _, features = query.shape
    if not samples * positions:
        return out
    tile, groups = _tile(query, key)
    tokens = [tensor.flatten(0, 1) for tensor in (query, key)]
    angles = [tensor.expand(samples, positions, features // 2) for tensor in (cos, sin)]
    norm_and_rotate[(cdiv(samples * positions, tile["TOKENS"]), groups)](
        *out, *tokens, query_weight.contiguous(), key_weight.contiguous(), *angles,
        samples * positions, positions, query.shape[2], key.shape[2], features // 2,
        *tokens[0].stride(), *tokens[1].stride(), *angles[0].stride(), *angles[1].stride(), eps, **tile, **OPTIONS,
    )  # fmt: skip
    return out


@CustomOp.define("d9d_triton::normed_rope_backward")
def backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed RoPE, backward: gradients of query [B, S, N, D], key [B, S, K, D] and both weights [D], in their dtypes.

    ``grad_query`` and ``grad_key`` are the gradients of the outputs; the other arguments are the forward's.
    """
    of_query, of_key = empty_like(query), empty_like(key)
    of_weights = fill_gradients(
        of_query, of_key, grad_query, grad_key, query, key, query_weight, key_weight, cos, sin, eps
    )
    return of_query, of_key, *of_weights


def fill_gradients(
    of_query: Tensor,
    of_key: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normed RoPE, backward into given memory: fills the gradients of query and key; returns both weight gradients [D].

    ``of_query`` [B, S, N, D] and ``of_key`` [B, S, K, D] receive the gradients; each token's heads are contiguous, the
    token stride is arbitrary. For the other arguments see :func:`backward`.
    """
    samples, positions, _, features = query.shape
    if not samples * positions:
        return torch.zeros_like(query_weight), torch.zeros_like(key_weight)
    tile, groups = _tile(query, key)
    tiles = cdiv(samples * positions, tile["TOKENS"])
    programs = cdiv(persistent_programs(query, tiles * groups, _PROGRAMS_EACH), groups)
    partial = torch.empty(programs * groups, features, dtype=torch.float32, device=query.device)
    of_queries = programs * tile["QUERY_GROUPS"]
    partials = partial[:of_queries], partial[of_queries:]
    found = [tensor.view(-1, *tensor.shape[2:]) for tensor in (of_query, of_key)]
    tokens = [tensor.flatten(0, 1) for tensor in (grad_query, grad_key, query, key)]
    angles = [tensor.expand(samples, positions, features // 2) for tensor in (cos, sin)]
    differentiate[(programs, groups)](
        *found, *partials, *tokens, query_weight.contiguous(), key_weight.contiguous(), *angles,
        samples * positions, positions, query.shape[2], key.shape[2], features // 2,
        *(tensor.stride(0) for tensor in found), *(stride for tensor in tokens for stride in tensor.stride()),
        *angles[0].stride(), *angles[1].stride(), eps, **tile, **OPTIONS,
    )  # fmt: skip
    return sums_of_two(partial, of_queries, (query_weight.dtype, key_weight.dtype))


def _tile(query: Tensor, key: Tensor) -> tuple[dict[str, Any], int]:
    """Tile sizes and warps of a program, and the number of programs that share the heads of a token."""
    width = next_power_of_2(query.shape[3] // 2)
    tokens = max(1, _WARPS * WARP * _PAIRS_EACH // width)
    counts = query.shape[2], key.shape[2]
    # As many heads per program as divide both head counts, up to _HEADS.
    common = math.gcd(*counts)
    heads = max(each for each in range(1, _HEADS + 1) if common % each == 0)
    if 2 * heads < min(_HEADS, *counts):
        heads = min(_HEADS, *counts)
    groups = [cdiv(count, heads) for count in counts]
    exact = common % heads == 0 and 2 * width == query.shape[3] and query.shape[0] * query.shape[1] % tokens == 0
    tile = {
        "QUERY_GROUPS": groups[0], "HEADS": heads, "TOKENS": tokens, "PAIRS": width, "EXACT": exact, "num_warps": _WARPS
    }  # fmt: skip
    return tile, sum(groups)


def _check(query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise an error for dtypes that the kernel would misread, and shapes for which it would read out of bounds."""
    named = {
        "query": query, "key": key, "query_weight": query_weight, "key_weight": key_weight, "cos": cos, "sin": sin
    }  # fmt: skip
    check_floats("normed_rope", **named)
    samples, positions, _, features = query.shape
    angles = {(count, positions, features // 2) for count in (1, samples)}
    same = (*key.shape[:2], key.shape[3]) == (samples, positions, features)
    weights = query_weight.shape == key_weight.shape == (features,)
    if not (same and weights) or features % 2 or tuple(cos.shape) not in angles or tuple(sin.shape) not in angles:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(
            f"normed_rope.triton: {shapes} must have the shapes [B, S, N, D], [B, S, K, D], [D], [D] and twice [B or "
            "1, S, D/2]"
        )


@forward.register_fake
def _fake(
    query: Tensor, key: Tensor, _of_query: Tensor, _of_key: Tensor, _cos: Tensor, _sin: Tensor, _eps: float
) -> tuple[Tensor, Tensor]:
    return empty_like(query), empty_like(key)


@backward.register_fake
def _fake_backward(
    _grad_query: Tensor,
    _grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    _cos: Tensor,
    _sin: Tensor,
    _eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_like(query), empty_like(key), empty_like(query_weight), empty_like(key_weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
    grads = backward(grad_query, grad_key, *ctx.saved_tensors, ctx.eps)
    found = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:4], strict=True))
    return *found, None, None, None


forward.register_autograd(_backward, setup_context=_keep)
