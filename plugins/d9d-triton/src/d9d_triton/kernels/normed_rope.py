"""Kernels of head norms with rotary positions, see :mod:`d9d_triton.normed_rope`.

A program handles TOKENS tokens and HEADS heads of each token, either query or key heads, one head after the other:
programs whose index in the grid's second dimension is below QUERY_GROUPS handle query heads, the others key heads. A
tile is one head of all tokens of the program; only one tile at a time fits into registers, together with cosines, sines
and weights. A rotation pairs feature i with feature i + D/2, so a head is handled as two tiles [TOKENS, PAIRS] with
PAIRS >= D/2. TOKENS and PAIRS are powers of two. EXACT means that tiles divide all dimensions, so that no mask is
needed.

Arguments: a name made of a tensor [T, heads, D] and a dimension, such as ``query_token``, is a stride; T is B x S;
``half`` is D/2. Outputs are contiguous, except that the token stride of gradients is arbitrary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
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
    tokens,
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
    QUERY_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Normed-RoPE kernel: RMSNorm and rotation of a group of heads of query [T, N, D] or key [T, K, D] for some tokens.

    The weights are [D], contiguous; cos and sin are [B, S, D/2].
    """
    group = tl.program_id(1)
    if group < QUERY_GROUPS:
        _forward_heads(
            query_out, query, query_weight, cos, sin, tokens, positions, query_heads, half, query_token, query_head,
            query_feature, cos_sample, cos_position, cos_pair, sin_sample, sin_position, sin_pair, eps,
            group * HEADS, HEADS, TOKENS, PAIRS, EXACT,
        )  # fmt: skip
    else:
        _forward_heads(
            key_out, key, key_weight, cos, sin, tokens, positions, key_heads, half, key_token, key_head,
            key_feature, cos_sample, cos_position, cos_pair, sin_sample, sin_position, sin_pair, eps,
            (group - QUERY_GROUPS) * HEADS, HEADS, TOKENS, PAIRS, EXACT,
        )  # fmt: skip


@Launcher
@triton.jit
def differentiate(
    grad_query,
    grad_key,
    query_partial,
    key_partial,
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
    grad_query_token,
    grad_key_token,
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
    QUERY_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Normed-RoPE kernel: gradients of :func:`norm_and_rotate`; a program sums the weight gradient over its tokens.

    ``query_arrived`` and ``key_arrived`` are the gradients of the outputs. ``query_partial`` and ``key_partial``,
    float32, receive a row [D] of the weight gradient from each program with query heads or with key heads.
    """
    group = tl.program_id(1)
    if group < QUERY_GROUPS:
        _backward_heads(
            grad_query, query_partial, query_arrived, query, query_weight, cos, sin, tokens, positions, query_heads,
            half, grad_query_token, query_arrived_token, query_arrived_head, query_arrived_feature, query_token,
            query_head, query_feature, cos_sample, cos_position, cos_pair, sin_sample, sin_position, sin_pair, eps,
            group, QUERY_GROUPS, HEADS, TOKENS, PAIRS, EXACT,
        )  # fmt: skip
    else:
        _backward_heads(
            grad_key, key_partial, key_arrived, key, key_weight, cos, sin, tokens, positions, key_heads,
            half, grad_key_token, key_arrived_token, key_arrived_head, key_arrived_feature, key_token, key_head,
            key_feature, cos_sample, cos_position, cos_pair, sin_sample, sin_position, sin_pair, eps,
            group - QUERY_GROUPS, tl.num_programs(1) - QUERY_GROUPS, HEADS, TOKENS, PAIRS, EXACT,
        )  # fmt: skip


@triton.jit
def _forward_heads(
    out, x, weight, cos, sin, tokens, positions, heads, half, x_token, x_head, x_feature, cos_sample, cos_position,
    cos_pair, sin_sample, sin_position, sin_pair, eps, first_head,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a group of heads of x [T, heads, D]."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    there = (token < tokens) & (pair < half)
    c = _angles(cos, token, pair, there, positions, cos_sample, cos_position, cos_pair, EXACT)
    s = _angles(sin, token, pair, there, positions, sin_sample, sin_position, sin_pair, EXACT)
    weight_first, weight_second = _weights(weight, pair, half, EXACT)
    source, target = _at(x, token, pair, x_token, x_feature), _at(out, token, pair, heads * half * 2, 1)
    for number in tl.static_range(HEADS):
        head = first_head + number
        here = _there(there, head, heads, EXACT)
        first = _load(source + head.to(tl.int64) * x_head, here, EXACT)
        second = _load(source + head.to(tl.int64) * x_head + half * x_feature, here, EXACT)
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (half * 2) + eps)[:, None]
        first, second = first * scale * weight_first, second * scale * weight_second
        _store(target + head * half * 2, first * c - second * s, here, EXACT)
        _store(target + head * half * 2 + half, second * c + first * s, here, EXACT)


@triton.jit
def _backward_heads(
    out, partial, arrived, x, weight, cos, sin, tokens, positions, heads, half, out_token, arrived_token,
    arrived_head, arrived_feature, x_token, x_head, x_feature, cos_sample, cos_position, cos_pair, sin_sample,
    sin_position, sin_pair, eps, group, groups,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a group of heads of x [T, heads, D], and this program's part of the weight gradient."""
    pair = tl.arange(0, PAIRS)[None, :]
    weight_first, weight_second = _weights(weight, pair, half, EXACT)
    of_first = tl.zeros((TOKENS, PAIRS), tl.float32)
    of_second = tl.zeros((TOKENS, PAIRS), tl.float32)
    # Tiles are interleaved over programs, so that concurrent programs read neighbouring tokens. Not a loop over a
    # range, which Triton 3.6 cannot interpret with NumPy 2.4.
    at = tl.program_id(0) * TOKENS
    while at < tokens:
        token = (at + tl.arange(0, TOKENS))[:, None]
        there = (token < tokens) & (pair < half)
        c = _angles(cos, token, pair, there, positions, cos_sample, cos_position, cos_pair, EXACT)
        s = _angles(sin, token, pair, there, positions, sin_sample, sin_position, sin_pair, EXACT)
        source, target = _at(x, token, pair, x_token, x_feature), _at(out, token, pair, out_token, 1)
        grad = _at(arrived, token, pair, arrived_token, arrived_feature)
        for number in tl.static_range(HEADS):
            head = group * HEADS + number
            first, second = _backward_head(
                target, grad, source, weight_first, weight_second, c, s, _there(there, head, heads, EXACT), head, half,
                arrived_head, arrived_feature, x_head, x_feature, eps, EXACT,
            )  # fmt: skip
            of_first += first
            of_second += second
        at += tl.num_programs(0) * TOKENS
    pair = tl.arange(0, PAIRS)
    sums = partial + (tl.program_id(0).to(tl.int64) * groups + group) * half * 2 + pair
    tl.store(sums, tl.sum(of_first, axis=0), pair < half)
    tl.store(sums + half, tl.sum(of_second, axis=0), pair < half)


@triton.jit
def _backward_head(
    target, arrived, source, weight_first, weight_second, c, s, there, head, half, arrived_head,
    arrived_feature, x_head, x_feature, eps, EXACT: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one head of some tokens; return the weight gradient's halves, float32 [TOKENS, PAIRS]."""
    source, target = source + head.to(tl.int64) * x_head, target + head * half * 2
    grad = arrived + head.to(tl.int64) * arrived_head
    first = _load(source, there, EXACT)
    second = _load(source + half * x_feature, there, EXACT)
    turned_first = _load(grad, there, EXACT)
    turned_second = _load(grad + half * arrived_feature, there, EXACT)
    grad_first = turned_first * c + turned_second * s
    grad_second = turned_second * c - turned_first * s
    # The gradient of x is ``(grad * weight) * scale - x * shrink``, the gradient of the weight ``grad * x * scale``.
    product_first, product_second = grad_first * first, grad_second * second
    # Two independent sums, so that they overlap.
    square = tl.sum(first * first + second * second, axis=1) / (half * 2)
    product = tl.sum(product_first * weight_first + product_second * weight_second, axis=1) / (half * 2)
    scale = tl.rsqrt(square + eps)
    if not EXACT:
        # Masked rows are zeros; if eps is 0, their scale would be infinite.
        scale = tl.where(tl.max(there.to(tl.int32), axis=1) > 0, scale, 0.0)
    shrink = (scale * scale * scale * product)[:, None]
    scale = scale[:, None]
    _store(target, grad_first * weight_first * scale - first * shrink, there, EXACT)
    _store(target + half, grad_second * weight_second * scale - second * shrink, there, EXACT)
    return product_first * scale, product_second * scale


@triton.jit
def _angles(angles, token, pair, there, positions, at_sample, at_position, at_pair, EXACT: tl.constexpr):
    """Cosines or sines of some tokens, float32 [TOKENS, PAIRS]."""
    sample, position = (token // positions).to(tl.int64), (token % positions).to(tl.int64)
    return _load(angles + sample * at_sample + position * at_position + pair * at_pair, there, EXACT)


@triton.jit
def _weights(weight, pair, half, EXACT: tl.constexpr):
    """Halves of a weight [D], float32 [1, PAIRS]."""
    return _load(weight + pair, pair < half, EXACT), _load(weight + half + pair, pair < half, EXACT)


@triton.jit
def _at(x, token, pair, x_token, x_feature):
    """Addresses of the first half of features of the first head, for some tokens."""
    return x + token.to(tl.int64) * x_token + pair * x_feature


@triton.jit
def _there(there, head, heads, EXACT: tl.constexpr):
    """Mask of the elements of one head; false for a head index beyond the last head."""
    return there if EXACT else there & (tl.zeros_like(there).to(tl.int32) + head < heads)


@triton.jit
def _load(x, there, EXACT: tl.constexpr):
    """Load elements in float32; zeros where the mask is false."""
    return tl.load(x).to(tl.float32) if EXACT else tl.load(x, there, other=0.0).to(tl.float32)


@triton.jit
def _store(target, x, there, EXACT: tl.constexpr):
    """Store values, cast to the dtype of the target."""
    if EXACT:
        tl.store(target, x.to(target.dtype.element_ty))
    else:
        tl.store(target, x.to(target.dtype.element_ty), there)
