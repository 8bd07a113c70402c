"""Kernel of the inputs of attention, see :mod:`d9d_triton.joint.attention_inputs`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def copy_rows(out, x, rows, features, out_row, x_row, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Copy kernel: copy a block of features of a block of rows to other memory.

    Args:
        out: [R, F], out; contiguous features.
        x: [R, F]; contiguous features.
        rows: R.
        features: F.
        out_row: stride of out.
        x_row: stride of x.
        ROWS: rows of one program.
        FEATURES: features of one program, a power of two.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    feature = (tl.program_id(1) * FEATURES + tl.arange(0, FEATURES))[None, :]
    there = (row < rows) & (feature < features)
    tl.store(out + row * out_row + feature, tl.load(x + row * x_row + feature, there), there)
