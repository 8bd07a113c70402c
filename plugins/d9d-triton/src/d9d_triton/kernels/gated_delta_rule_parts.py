"""Parts that the kernels of the gated delta rule share, see :mod:`d9d_triton.gated_delta_rule`.

Shapes: B samples, S positions, N value heads, H = B N heads of all samples, M chunks of a sample, C positions of a
chunk, D_k and D_v features of a key and value head, K and V the same numbers, padded as tiles need it. A program of a
chunk handles one chunk of one head; programs are numbered head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.support import interpreted

#: Whether Triton's interpreter runs the kernels, as it was when Triton was imported; it has no products of bfloat16.
_INTERPRETED = tl.constexpr(interpreted())
#: Constant that is added to the sum of squares of a query or key, before the root: ``EPS`` of the op.
EPS = tl.constexpr(1e-6)
#: Smallest logarithm of a decay, the logarithm of the smallest normal float32; smaller decays are factors of 0, too.
LEAST_DECAY = tl.constexpr(-87.33654475055310)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Matrix product, float32; PRECISION is the precision of the product of float32 matrices."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def read_decays(decay, documents, sample, position, head, length, heads, DOCUMENTS: tl.constexpr):
    """Cumulated logarithms of decays and borders of documents within a chunk, for its positions [C].

    Returns:
        Cumulated logarithms, float64 [C]: differences keep the precision of float32 even if other documents have large
        decays. Number of borders from the chunk's first position to each position, int32 [C]; 0 where a position
        continues the document that ended the previous chunk. Whether each position is the first one of a document.
    """
    given = load_numbers(decay, sample, position, head, length, heads)
    g = tl.where(given < LEAST_DECAY, LEAST_DECAY, given)  # tl.maximum would replace NaN
    starts = position == 0
    number = tl.zeros_like(position)
    if DOCUMENTS:
        base = documents + sample.to(tl.int64) * length + position
        later = (position > 0) & (position < length)
        border = later & (tl.load(base, later, other=0) != tl.load(base - 1, later, other=0))
        starts = starts | border
        number = tl.cumsum(border.to(tl.int32), 0)
    return tl.cumsum(g.to(tl.float64), 0), number, starts


@triton.jit
def decays_between(total, number, C: tl.constexpr):
    """Decays from position s to position t of a chunk, float32 [C (t), C (s)]; 0 where t does not see s."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    sees = (row >= column) & (number[:, None] == number[None, :])
    return tl.exp(tl.where(sees, (total[:, None] - total[None, :]).to(tl.float32), float("-inf")))


@triton.jit
def turned_decays_between(total, number, C: tl.constexpr):
    """Transpose of :func:`decays_between`, float32 [C (s), C (t)]."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    sees = (row <= column) & (number[:, None] == number[None, :])
    return tl.exp(tl.where(sees, (total[None, :] - total[:, None]).to(tl.float32), float("-inf")))


@triton.jit
def decays_across(total, number, C: tl.constexpr):
    """Decays across the borders of a chunk.

    Returns:
        Decay of the previous chunk's state until each position [C] (r), decay from each position to the chunk's end
        [C], and decay of the state by the whole chunk; float32, 0 across borders of documents.
    """
    last = tl.sum(tl.where(tl.arange(0, C) == C - 1, total, 0.0), 0)
    borders = tl.max(number, 0)
    read = tl.where(number == 0, tl.exp(total.to(tl.float32)), 0.0)
    end = tl.where(number == borders, tl.exp((last - total).to(tl.float32)), 0.0)
    return read, end, tl.where(borders == 0, tl.exp(last.to(tl.float32)), 0.0)


@triton.jit
def inverse_norms_of(x):
    """Inverse Euclidean norms of rows, float32 [C]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def load_numbers(x, sample, position, head, length, heads):
    """Load numbers of a head from contiguous x [B, S, N], float32 [C]; zeros after the last position."""
    row = (sample.to(tl.int64) * length + position) * heads + head
    return tl.load(x + row, position < length, other=0.0).to(tl.float32)


@triton.jit
def load_block(
    x,
    sample,
    position,
    head,
    length,
    of_sample,
    of_position,
    of_head,
    begin,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load a head's positions [C] and a block of features from x [B, S, heads, FEATURES]: [C, BLOCK]; zeros outside."""
    feature = begin + tl.arange(0, BLOCK)
    base = x + sample.to(tl.int64) * of_sample + head.to(tl.int64) * of_head
    there = (position < length)[:, None] & (feature < FEATURES)[None, :]
    return tl.load(base + position.to(tl.int64)[:, None] * of_position + feature[None, :], there, other=0.0)


@triton.jit
def load_turned(
    x, sample, position, head, length, of_sample, of_position, of_head, FEATURES: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the transpose of :func:`load_block` from the first feature on: [BLOCK, C]; zeros outside."""
    feature = tl.arange(0, BLOCK)
    base = x + sample.to(tl.int64) * of_sample + head.to(tl.int64) * of_head
    there = (position < length)[None, :] & (feature < FEATURES)[:, None]
    return tl.load(base + position.to(tl.int64)[None, :] * of_position + feature[:, None], there, other=0.0)


@triton.jit
def apply_inverse(
    corrections,
    changes,
    inverse,
    k,
    value,
    strength,
    read,
    program,
    sample,
    position,
    head,
    length,
    value_sample,
    value_position,
    value_head,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store W and U of a chunk, the products of T (float32 [C, C]) with weighted keys and values."""
    place = program.to(tl.int64)
    own = tl.arange(0, C)[:, None]
    factor = (inverse * (strength * read)[None, :]).to(k.dtype)
    correction = multiply(factor, k, PRECISION)
    target = corrections + place * C * KEYS + own * KEYS + tl.arange(0, KEYS)[None, :]
    tl.store(target, correction.to(corrections.dtype.element_ty))
    factor = (inverse * strength[None, :]).to(k.dtype)
    for block in tl.static_range(0, VALUES, BLOCK):
        v = load_block(
            value, sample, position, head, length, value_sample, value_position, value_head, block, VALUE_DIM, BLOCK
        )
        change = multiply(factor, v, PRECISION)
        target = changes + place * C * VALUES + own * VALUES + block + tl.arange(0, BLOCK)[None, :]
        tl.store(target, change.to(changes.dtype.element_ty))
