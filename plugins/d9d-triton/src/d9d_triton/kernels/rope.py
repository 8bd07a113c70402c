"""Kernel of rotary positions, see :mod:`d9d_triton.rope`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def rotate(
    query_out,
    key_out,
    query,
    key,
    cos,
    sin,
    positions,
    query_heads,
    key_heads,
    half,
    query_sample,
    query_position,
    query_head,
    query_feature,
    key_sample,
    key_position,
    key_head,
    key_feature,
    cos_sample,
    cos_position,
    cos_pair,
    sin_sample,
    sin_position,
    sin_pair,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,
):
    """RoPE kernel: rotate heads of one token's query [B, S, N, D] and key [B, S, K, D] by cos and sin [B, S, D/2].

    Outputs are contiguous. Arguments named after an input and a dimension are strides; ``half`` is D/2. A program
    rotates QUERY_HEADS query heads and KEY_HEADS key heads of at most PAIRS pairs each, all powers of two. With BACK it
    rotates by the opposite angles.
    """
    token = tl.program_id(0).to(tl.int64)
    sample, position = token // positions, token % positions
    pair = tl.arange(0, PAIRS).to(tl.int64)
    c = tl.load(cos + sample * cos_sample + position * cos_position + pair * cos_pair, pair < half, other=0.0)
    s = tl.load(sin + sample * sin_sample + position * sin_position + pair * sin_pair, pair < half, other=0.0)
    c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
    if BACK:
        s = -s
    first = tl.program_id(1).to(tl.int64)
    query += sample * query_sample + position * query_position
    key += sample * key_sample + position * key_position
    _rotate_heads(
        query_out + token * query_heads * half * 2, query, c, s, first * QUERY_HEADS, query_heads, half,
        query_head, query_feature, QUERY_HEADS, PAIRS,
    )  # fmt: skip
    _rotate_heads(
        key_out + token * key_heads * half * 2, key, c, s, first * KEY_HEADS, key_heads, half,
        key_head, key_feature, KEY_HEADS, PAIRS,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    out,
    x,
    cos,
    sin,
    first_head,
    heads,
    half,
    x_head,
    x_feature,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate a block of heads of one token; cos and sin are [1, PAIRS]."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS).to(tl.int64)[None, :]
    there = (head < heads) & (pair < half)
    source = x + head * x_head + pair * x_feature
    first = tl.load(source, there, other=0.0).to(tl.float32)
    second = tl.load(source + half * x_feature, there, other=0.0).to(tl.float32)
    target = out + head * half * 2 + pair
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), there)
    tl.store(target + half, (second * cos + first * sin).to(out.dtype.element_ty), there)
