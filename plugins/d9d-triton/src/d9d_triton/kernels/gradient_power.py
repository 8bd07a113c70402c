"""Kernel of sums of squares of many tensors, see :mod:`d9d_triton.gradient_power`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_squares(
    table,
    owners,
    firsts,
    sums,
    count,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient-power kernel: sum of the squares of ``PARTS * BLOCK`` elements of one tensor.

    Args:
        table: int64 [2, n]: address and number of elements of each tensor.
        owners: int32 [P]: tensor of each program.
        firsts: int32 [n]: first program of each tensor.
        sums: float32 [P], out.
        count: n.
        DTYPE: dtype of the tensors.
        ALIGNED: whether all addresses are multiples of 16 bytes.
        PARTS: number of loads of a program.
        BLOCK: elements of one load.
    """
    owner = tl.load(owners + tl.program_id(0)).to(tl.int64)
    begin = (tl.program_id(0) - tl.load(firsts + owner)).to(tl.int64) * (PARTS * BLOCK)
    values = tl.load(table + owner).to(tl.pointer_type(DTYPE)) + begin
    if ALIGNED:
        values = tl.multiple_of(values, 16)
    left = tl.load(table + count + owner) - begin
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    # Masked loads are not vectorized, so only the last program of a tensor has a mask.
    if left >= PARTS * BLOCK:
        for part in tl.static_range(PARTS):
            value = tl.load(values + part * BLOCK + place).to(tl.float32)
            total += value * value
    else:
        for part in tl.static_range(PARTS):
            value = tl.load(values + part * BLOCK + place, part * BLOCK + place < left, other=0.0).to(tl.float32)
            total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
