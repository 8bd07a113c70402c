"""Kernels of RMSNorm, alone and with a residual addition, see :mod:`d9d_triton.rms_norm`."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """RMSNorm kernel: norm of some rows, or of their sums with others.

    Args:
        out: [R, D], out, contiguous.
        sums: [R, D], out, contiguous: x + added; any tensor without ``ADDS``.
        x: [R, D].
        added: [R, D]; any tensor without ``ADDS``.
        weight: [D].
        rows: R.
        features: D.
        x_row: stride of x.
        x_feature: stride of x.
        added_row: stride of what is added.
        added_feature: stride of what is added.
        weight_feature: stride of the weight.
        eps: added to the mean square.
        ROWS: rows of a program.
        FEATURES: D or more, a power of two.
        ADDS: whether something is added.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, FEATURES).to(tl.int64)[None, :]
    there = (row < rows) & (feature < features)
    factor = tl.load(weight + feature * weight_feature, feature < features, other=0.0).to(tl.float32)
    wide = _load_rows(x, row, feature, rows, features, x_row, x_feature).to(tl.float32)
    if ADDS:
        wide += _load_rows(added, row, feature, rows, features, added_row, added_feature).to(tl.float32)
        # The norm is that of what the backward and later operations read.
        rounded = wide.to(sums.dtype.element_ty)
        tl.store(sums + row * features + feature, rounded, there)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / features + eps)[:, None]
    tl.store(out + row * features + feature, (wide * scale * factor).to(out.dtype.element_ty), there)


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
    """RMSNorm kernel: gradients of :func:`normalise`; each program sums the weight's over its rows.

    Args:
        grad_x: [R, D], out, contiguous; any tensor without ``OF_X``.
        grad_added: [R, D], out, contiguous: the same in another dtype; any tensor without ``TWICE``.
        partial: float32 [P, D], out, contiguous: sums of the P programs; any tensor without ``OF_WEIGHT``.
        grad: [R, D], gradient of the output.
        residual: [R, D], gradient that is added to that of x; any tensor without ``ADDS``.
        x: [R, D], what was normalised.
        weight: [D].
        rows: R.
        features: D.
        grad_row: stride of the gradient.
        grad_feature: stride of the gradient.
        residual_row: stride of the gradient that is added.
        residual_feature: stride of the gradient that is added.
        x_row: stride of x.
        x_feature: stride of x.
        weight_feature: stride of the weight.
        eps: as in the forward.
        ROWS: rows of a tile; a program has several tiles.
        FEATURES: D or more, a power of two.
        OF_X: whether the gradient of x is needed.
        OF_WEIGHT: whether that of the weight is.
        ADDS: whether a gradient is added; only with ``OF_X``.
        TWICE: whether it is written in two dtypes; only with ``OF_X``.
        AHEAD: whether a program loads a tile before it computes with the one before.
    """
    feature = tl.arange(0, FEATURES).to(tl.int64)[None, :]
    factor = tl.load(weight + feature * weight_feature, feature < features, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    # Programs take turns, so that those that run together read neighbouring rows. There is no loop over a range, which
    # Triton 3.6 cannot interpret with NumPy 2.4.
    first, step = tl.program_id(0).to(tl.int64) * ROWS, tl.num_programs(0) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    if AHEAD:
        next_x = _load_rows(x, row, feature, rows, features, x_row, x_feature)
        next_grad = _load_rows(grad, row, feature, rows, features, grad_row, grad_feature)
    while first < rows:
        row = first + tl.arange(0, ROWS)[:, None]
        if ADDS:
            # It arrives while rows are summed up. Loaded a tile ahead, it would take the registers of other programs.
            beside = _load_rows(residual, row, feature, rows, features, residual_row, residual_feature)
        if AHEAD:
            wide, arrived = next_x.to(tl.float32), next_grad.to(tl.float32)
            next_x = _load_rows(x, row + step, feature, rows, features, x_row, x_feature)
            next_grad = _load_rows(grad, row + step, feature, rows, features, grad_row, grad_feature)
        else:
            wide = _load_rows(x, row, feature, rows, features, x_row, x_feature).to(tl.float32)
            arrived = _load_rows(grad, row, feature, rows, features, grad_row, grad_feature).to(tl.float32)
        weighted = arrived * factor
        # Neither sum waits for the other.
        square = tl.sum(wide * wide, axis=1) / features
        product = tl.sum(weighted * wide, axis=1) / features
        scale = tl.rsqrt(square + eps)[:, None]
        # Rows beyond the last are zeros, whose scale is infinite without an epsilon.
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
    """Rows int64 [ROWS, 1] and features int64 [1, FEATURES] of x; zeros beyond both."""
    there = (row < rows) & (feature < features)
    return tl.load(x + row * x_row + feature * x_feature, there, other=0.0)
