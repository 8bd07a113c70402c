"""Kernels of head norms with rotary positions, see :mod:`d9d_triton.normed_rope`.

Heads are handled as halves, for a rotation pairs feature i with feature i + D/2. The numbers named after a tensor
[T, heads, D] and one of its dims are strides, T is B x S, ``half`` is D/2, and outputs are contiguous. Programs handle
QUERY_HEADS and KEY_HEADS heads of at most PAIRS pairs each, all powers of two; EXACT, of that many: no mask is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_and_rotate(
    query_out,
    key_out,
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    positions,
    query_heads,
    key_heads,
    half,
    query_token,
    query_head,
    query_feature,
    key_token,
    key_head,
    key_feature,
    cos_sample,
    cos_position,
    cos_pair,
    sin_sample,
    sin_position,
    sin_pair,
    eps,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """RMSNorm and rotation of some heads of one token's query [T, N, D] and key [T, K, D].

    The weights are [D], contiguous; cos and sin are [B, S, D/2].
    """
    sample, position = (tl.program_id(0) // positions).to(tl.int64), (tl.program_id(0) % positions).to(tl.int64)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cos += sample * cos_sample + position * cos_position
    sin += sample * sin_sample + position * sin_position
    _forward_heads(
        query_out + token * query_heads * half * 2, query + token * query_token,
        query_weight, cos, sin, group * QUERY_HEADS, query_heads, half, query_head, query_feature, cos_pair, sin_pair,
        eps, QUERY_HEADS, PAIRS, EXACT,
    )  # fmt: skip
    _forward_heads(
        key_out + token * key_heads * half * 2, key + token * key_token,
        key_weight, cos, sin, group * KEY_HEADS, key_heads, half, key_head, key_feature, cos_pair, sin_pair,
        eps, KEY_HEADS, PAIRS, EXACT,
    )  # fmt: skip


@triton.jit
def differentiate(
    grad_query,
    grad_key,
    partial,
    query_arrived,
    key_arrived,
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    tokens,
    positions,
    query_heads,
    key_heads,
    half,
    query_arrived_token,
    query_arrived_head,
    query_arrived_feature,
    key_arrived_token,
    key_arrived_head,
    key_arrived_feature,
    query_token,
    query_head,
    query_feature,
    key_token,
    key_head,
    key_feature,
    cos_sample,
    cos_position,
    cos_pair,
    sin_sample,
    sin_position,
    sin_pair,
    eps,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of :func:`norm_and_rotate`; a program loops over tokens, and sums the gradients of the weights.

    ``query_arrived`` and ``key_arrived`` are the gradients of the outputs; ``partial`` float32 [P, 2, D] takes the sums
    of the P programs, of the query's weight and of the key's.
    """
    query_first, query_second = _weights(query_weight, half, QUERY_HEADS, PAIRS, EXACT)
    key_first, key_second = _weights(key_weight, half, KEY_HEADS, PAIRS, EXACT)
    of_query_first = tl.zeros((QUERY_HEADS, PAIRS), tl.float32)
    of_query_second = tl.zeros((QUERY_HEADS, PAIRS), tl.float32)
    of_key_first = tl.zeros((KEY_HEADS, PAIRS), tl.float32)
    of_key_second = tl.zeros((KEY_HEADS, PAIRS), tl.float32)
    group = tl.program_id(1).to(tl.int64)
    # Programs take turns, so that those that run together read neighbouring tokens. There is no loop over a range,
    # which Triton 3.6 cannot interpret with NumPy 2.4.
    at = tl.program_id(0)
    while at < tokens:
        token, sample, position = at.to(tl.int64), (at // positions).to(tl.int64), (at % positions).to(tl.int64)
        cos_here = cos + sample * cos_sample + position * cos_position
        sin_here = sin + sample * sin_sample + position * sin_position
        first, second = _backward_heads(
            grad_query + token * query_heads * half * 2,
            query_arrived + token * query_arrived_token,
            query + token * query_token,
            query_first, query_second, cos_here, sin_here, group * QUERY_HEADS, query_heads, half,
            query_arrived_head, query_arrived_feature, query_head, query_feature, cos_pair, sin_pair, eps,
            QUERY_HEADS, PAIRS, EXACT,
        )  # fmt: skip
        of_query_first += first
        of_query_second += second
        first, second = _backward_heads(
            grad_key + token * key_heads * half * 2,
            key_arrived + token * key_arrived_token,
            key + token * key_token,
            key_first, key_second, cos_here, sin_here, group * KEY_HEADS, key_heads, half,
            key_arrived_head, key_arrived_feature, key_head, key_feature, cos_pair, sin_pair, eps,
            KEY_HEADS, PAIRS, EXACT,
        )  # fmt: skip
        of_key_first += first
        of_key_second += second
        at += tl.num_programs(0)
    pair = tl.arange(0, PAIRS)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group
    sums = partial + program * half * 4 + pair
    tl.store(sums, tl.sum(of_query_first, axis=0), pair < half)
    tl.store(sums + half, tl.sum(of_query_second, axis=0), pair < half)
    tl.store(sums + half * 2, tl.sum(of_key_first, axis=0), pair < half)
    tl.store(sums + half * 3, tl.sum(of_key_second, axis=0), pair < half)


@triton.jit
def _angles(cos, sin, pair, cos_pair, sin_pair, half, HEADS: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr):
    """Cosines and sines of one token for each head, float32 [HEADS, PAIRS].

    Each head reads them anew, out of the cache: threads that passed them on would wait for each other.
    """
    each = tl.zeros((HEADS, PAIRS), tl.int32) + pair
    c = _load(cos + each * cos_pair, each < half, EXACT)
    s = _load(sin + each * sin_pair, each < half, EXACT)
    return c, s


@triton.jit
def _weights(weight, half, HEADS: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr):
    """Halves of a weight [D] for each head, float32 [HEADS, PAIRS]."""
    pair = tl.zeros((HEADS, PAIRS), tl.int32) + tl.arange(0, PAIRS)[None, :]
    return _load(weight + pair, pair < half, EXACT), _load(weight + half + pair, pair < half, EXACT)


@triton.jit
def _forward_heads(
    out,
    x,
    weight,
    cos,
    sin,
    first_head,
    heads,
    half,
    x_head,
    x_feature,
    cos_pair,
    sin_pair,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Norm and rotate some heads of one token."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    there = (head < heads) & (pair < half)
    source = x + head * x_head + pair * x_feature
    first = _load(source, there, EXACT)
    second = _load(source + half * x_feature, there, EXACT)
    weight_first, weight_second = _weights(weight, half, HEADS, PAIRS, EXACT)
    c, s = _angles(cos, sin, pair, cos_pair, sin_pair, half, HEADS, PAIRS, EXACT)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (half * 2) + eps)[:, None]
    first, second = first * scale * weight_first, second * scale * weight_second
    target = out + head * half * 2 + pair
    out_first = (first * c - second * s).to(out.dtype.element_ty)
    out_second = (second * c + first * s).to(out.dtype.element_ty)
    if EXACT:
        tl.store(target, out_first)
        tl.store(target + half, out_second)
    else:
        tl.store(target, out_first, there)
        tl.store(target + half, out_second, there)


@triton.jit
def _backward_heads(
    out,
    arrived,
    x,
    weight_first,
    weight_second,
    cos,
    sin,
    first_head,
    heads,
    half,
    arrived_head,
    arrived_feature,
    x_head,
    x_feature,
    cos_pair,
    sin_pair,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Store the gradient of some heads of one token; return those of the weight's halves, float32 [HEADS, PAIRS]."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    there = (head < heads) & (pair < half)
    source = x + head * x_head + pair * x_feature
    grad = arrived + head * arrived_head + pair * arrived_feature
    first = _load(source, there, EXACT)
    second = _load(source + half * x_feature, there, EXACT)
    turned_first = _load(grad, there, EXACT)
    turned_second = _load(grad + half * arrived_feature, there, EXACT)
    c, s = _angles(cos, sin, pair, cos_pair, sin_pair, half, HEADS, PAIRS, EXACT)
    grad_first = turned_first * c + turned_second * s
    grad_second = turned_second * c - turned_first * s
    # The gradient is ``(grad * weight) * scale - x * shrink``, and that of the weight ``grad * x * scale``.
    product_first, product_second = grad_first * first, grad_second * second
    # Neither sum waits for the other.
    square = tl.sum(first * first + second * second, axis=1) / (half * 2)
    product = tl.sum(product_first * weight_first + product_second * weight_second, axis=1) / (half * 2)
    scale = tl.rsqrt(square + eps)
    if not EXACT:
        # Heads beyond the last are zeros, whose scale is infinite without an epsilon.
        scale = tl.where(first_head + tl.arange(0, HEADS) < heads, scale, 0.0)
    shrink = (scale * scale * scale * product)[:, None]
    scale = scale[:, None]
    target = out + head * half * 2 + pair
    dtype = out.dtype.element_ty
    of_first = (grad_first * weight_first * scale - first * shrink).to(dtype)
    of_second = (grad_second * weight_second * scale - second * shrink).to(dtype)
    if EXACT:
        tl.store(target, of_first)
        tl.store(target + half, of_second)
    else:
        tl.store(target, of_first, there)
        tl.store(target + half, of_second, there)
    return product_first * scale, product_second * scale


@triton.jit
def _load(x, there, EXACT: tl.constexpr):
    """Elements in float32; zeros where there are none."""
    return tl.load(x).to(tl.float32) if EXACT else tl.load(x, there, other=0.0).to(tl.float32)
