"""Kernels of RMSNorm, alone and with a residual addition, see :mod:`d9d_triton.rms_norm`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def normalise(
    out,
    sums,
    x,
    added,
    weight,
    rows,
    features,
    x_row,
    x_feature,
    added_row,
    added_feature,
    weight_feature,
    eps,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    ADDS: tl.constexpr,
):
    """RMSNorm kernel: norm of a block of rows of ``x``, or with ``ADDS`` of ``x + added``.

    Args:
        out: [R, D], out, contiguous.
        sums: [R, D], out, contiguous: x + added; unused without ``ADDS``.
        x: [R, D].
        added: [R, D]; unused without ``ADDS``.
        weight: [D].
        rows: R.
        features: D.
        x_row: stride of x in dimension 0.
        x_feature: stride of x in dimension 1.
        added_row: stride of ``added`` in dimension 0.
        added_feature: stride of ``added`` in dimension 1.
        weight_feature: stride of the weight.
        eps: added to the mean square.
        ROWS: rows of one program.
        FEATURES: smallest power of two >= D.
        ADDS: whether to add ``added`` to x before the norm.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, FEATURES).to(tl.int64)[None, :]
    there = (row < rows) & (feature < features)
    factor = tl.load(weight + feature * weight_feature, feature < features, other=0.0).to(tl.float32)
    wide = _load_rows(x, row, feature, rows, features, x_row, x_feature).to(tl.float32)
    if ADDS:
        wide += _load_rows(added, row, feature, rows, features, added_row, added_feature).to(tl.float32)
        # Normalise the rounded sum, which the backward and later operations read.
        rounded = wide.to(sums.dtype.element_ty)
        tl.store(sums + row * features + feature, rounded, there)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / features + eps)[:, None]
    tl.store(out + row * features + feature, (wide * scale * factor).to(out.dtype.element_ty), there)


@Launcher
@triton.jit
def differentiate(
    grad_x,
    grad_added,
    partial,
    grad,
    residual,
    x,
    weight,
    rows,
    features,
    grad_row,
    grad_feature,
    residual_row,
    residual_feature,
    x_row,
    x_feature,
    weight_feature,
    eps,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    OF_X: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
    ADDS: tl.constexpr,
    TWICE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """RMSNorm kernel: gradients of :func:`normalise`; each program sums the weight gradient over its rows.

    Args:
        grad_x: [R, D], out, contiguous; unused without ``OF_X``.
        grad_added: [R, D], out, contiguous: the gradient of x in another dtype; unused without ``TWICE``.
        partial: float32 [P, D], out, contiguous: weight gradients of the P programs; unused without ``OF_WEIGHT``.
        grad: [R, D], gradient of the output.
        residual: [R, D], gradient that is added to the gradient of x; unused without ``ADDS``.
        x: [R, D], input of the norm.
        weight: [D].
        rows: R.
        features: D.
        grad_row: stride of the gradient in dimension 0.
        grad_feature: stride of the gradient in dimension 1.
        residual_row: stride of ``residual`` in dimension 0.
        residual_feature: stride of ``residual`` in dimension 1.
        x_row: stride of x in dimension 0.
        x_feature: stride of x in dimension 1.
        weight_feature: stride of the weight.
        eps: same value as in the forward.
        ROWS: rows of one tile; a program handles several tiles.
        FEATURES: smallest power of two >= D.
        OF_X: whether the gradient of x is needed.
        OF_WEIGHT: whether the gradient of the weight is needed.
        ADDS: whether to add ``residual``; only with ``OF_X``.
        TWICE: whether to write the gradient of x in two dtypes; only with ``OF_X``.
        AHEAD: whether a program loads the next tile before it computes the current one.
    """
    feature = tl.arange(0, FEATURES).to(tl.int64)[None, :]
    factor = tl.load(weight + feature * weight_feature, feature < features, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    # Tiles are interleaved over programs, so that concurrent programs read neighbouring rows. Not a loop over a range,
    # which Triton 3.6 cannot interpret with NumPy 2.4.
    first, step = tl.program_id(0).to(tl.int64) * ROWS, tl.num_programs(0) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    if AHEAD:
        next_x = _load_rows(x, row, feature, rows, features, x_row, x_feature)
        next_grad = _load_rows(grad, row, feature, rows, features, grad_row, grad_feature)
    while first < rows:
        row = first + tl.arange(0, ROWS)[:, None]
        if ADDS:
            # The load overlaps with the sums below. Loading a tile ahead would take registers from other programs.
            beside = _load_rows(residual, row, feature, rows, features, residual_row, residual_feature)
        if AHEAD:
            wide, arrived = next_x.to(tl.float32), next_grad.to(tl.float32)
            next_x = _load_rows(x, row + step, feature, rows, features, x_row, x_feature)
            next_grad = _load_rows(grad, row + step, feature, rows, features, grad_row, grad_feature)
        else:
            wide = _load_rows(x, row, feature, rows, features, x_row, x_feature).to(tl.float32)
            arrived = _load_rows(grad, row, feature, rows, features, grad_row, grad_feature).to(tl.float32)
        weighted = arrived * factor
        # Two independent sums, so that they overlap.
        square = tl.sum(wide * wide, axis=1) / features
        product = tl.sum(weighted * wide, axis=1) / features
        scale = tl.rsqrt(square + eps)[:, None]
        # Rows beyond the last are zeros; if eps is 0, their scale would be infinite.
        normed = tl.where(row < rows, wide * scale, 0.0)
        if OF_WEIGHT:
            total += arrived * normed
        if OF_X:
            found = (weighted - normed * product[:, None] * scale) * scale
            if ADDS:
                found += beside.to(tl.float32)
            there = (row < rows) & (feature < features)
            tl.store(grad_x + row * features + feature, found.to(grad_x.dtype.element_ty), there)
            if TWICE:
                tl.store(grad_added + row * features + feature, found.to(grad_added.dtype.element_ty), there)
        first += step
    if OF_WEIGHT:
        columns = tl.arange(0, FEATURES)
        sums = partial + tl.program_id(0).to(tl.int64) * features + columns
        tl.store(sums, tl.sum(total, axis=0), columns < features)


@triton.jit
def _load_rows(x, row, feature, rows, features, x_row, x_feature):
    """Load rows int64 [ROWS, 1] and features int64 [1, FEATURES] of x; zeros outside of x."""
    there = (row < rows) & (feature < features)
    return tl.load(x + row * x_row + feature * x_feature, there, other=0.0)
