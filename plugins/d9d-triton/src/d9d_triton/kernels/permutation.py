"""Kernels that copy tokens to rows and sum rows to tokens, see :mod:`d9d_triton.permutation`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def copy_to_rows(
    out,
    tokens,
    places,
    features,
    token_stride,
    feature_stride,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Permutation kernel: copy a block of features of each token, read once, to all of its rows.

    Args:
        out: [R, H], out, contiguous.
        tokens: [T, H].
        places: row of each of a token's k choices of experts, int64 [T, k], contiguous; every choice has a row.
        features: H.
        token_stride: stride of ``tokens`` in dimension 0.
        feature_stride: stride of ``tokens`` in dimension 1.
        CHOICES: k.
        BLOCK: features of one program.
    """
    token = tl.program_id(0).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    known = feature < features
    # Each token is read once, so it need not stay in the cache.
    values = tl.load(tokens + token * token_stride + feature * feature_stride, known, eviction_policy="evict_first")
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        tl.store(out + place * features + feature, values, known)


@Launcher
@triton.jit
def sum_rows(
    out,
    x,
    places,
    weights,
    rows,
    features,
    x_row,
    x_feature,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Permutation kernel: sum of each token's rows over a block of features.

    Args:
        out: [T, H], out, contiguous.
        x: [R, H].
        places: row of each of a token's k choices of experts, int64 [T, k], contiguous; R or more for no row.
        weights: [T, k], contiguous; unused without ``WEIGHTED``.
        rows: R.
        features: H.
        x_row: stride of x in dimension 0.
        x_feature: stride of x in dimension 1.
        CHOICES: k.
        WEIGHTED: whether rows are multiplied by weights.
        BLOCK: features of one program.
    """
    token = tl.program_id(0).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        there = feature < tl.where(place < rows, features, 0)
        part = tl.load(x + place * x_row + feature * x_feature, there, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += part
    tl.store(out + token * features + feature, total.to(out.dtype.element_ty), feature < features)


@Launcher
@triton.jit
def differentiate(
    grad_x,
    grad_weights,
    grad,
    x,
    places,
    weights,
    rows,
    grad_token,
    grad_feature,
    x_row,
    x_feature,
    FEATURES: tl.constexpr,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    OF_X: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Permutation kernel: gradients of the weighted :func:`sum_rows`; a program reads its token's gradient once.

    Args:
        grad_x: [R, H], out, contiguous; rows of no choice are not written and must be zeros; unused without
            ``OF_X``.
        grad_weights: [T, k], out, contiguous; unused without ``OF_WEIGHTS``.
        grad: [T, H], gradient of the sums.
        x: [R, H].
        places: row of each of a token's k choices of experts, int64 [T, k], contiguous; R or more for no row.
        weights: [T, k], contiguous.
        rows: R.
        grad_token: stride of the gradient in dimension 0.
        grad_feature: stride of the gradient in dimension 1.
        x_row: stride of x in dimension 0.
        x_feature: stride of x in dimension 1.
        FEATURES: H, a constant because Triton 3.6 with NumPy 2.4 cannot interpret the loop otherwise.
        CHOICES: k.
        LANES: smallest power of two >= k.
        OF_X: whether the gradient of the rows is needed.
        OF_WEIGHTS: whether the gradient of the weights is needed.
        BLOCK: features of one tile; a program handles several tiles.
    """
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, LANES)
    place = tl.load(places + token * CHOICES + choice, choice < CHOICES, other=rows)[:, None]
    weight = tl.load(weights + token * CHOICES + choice, choice < CHOICES, other=0.0).to(tl.float32)[:, None]
    product = tl.zeros((LANES,), tl.float32)
    for start in range(0, FEATURES, BLOCK):
        feature = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        known = feature < FEATURES
        arrived = tl.load(grad + token * grad_token + feature * grad_feature, known, other=0.0).to(tl.float32)
        there = known & (place < rows)
        if OF_WEIGHTS:
            part = tl.load(x + place * x_row + feature * x_feature, there, other=0.0).to(tl.float32)
            product += tl.sum(arrived * part, axis=1)
        if OF_X:
            tl.store(grad_x + place * FEATURES + feature, (arrived * weight).to(grad_x.dtype.element_ty), there)
    if OF_WEIGHTS:
        target = grad_weights + token * CHOICES + choice
        tl.store(target, product.to(grad_weights.dtype.element_ty), choice < CHOICES)
