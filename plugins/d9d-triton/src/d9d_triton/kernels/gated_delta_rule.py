"""Kernels of the forward of the gated delta rule; :mod:`d9d_triton.gated_delta_rule` has equations and symbols.

Shapes: B samples, S positions, N value heads, H = B N heads of all samples, M chunks of a sample, C positions of a
chunk, D_k and D_v features of a key and value head, K and V the same numbers, padded as tiles need it. A program of a
chunk handles one chunk of one head; programs are numbered head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.kernels.gated_delta_rule_parts import (
    apply_inverse,
    decays_across,
    decays_between,
    inverse_norms_of,
    load_block,
    load_numbers,
    load_turned,
    multiply,
    read_decays,
)

#: Rows of the diagonal blocks that are inverted row by row.
_ROWS = tl.constexpr(16)


@triton.jit
def solve_chunks(
    solved,
    corrections,
    changes,
    ends,
    keeps,
    key,
    value,
    decay,
    beta,
    documents,
    length,
    chunks,
    heads,
    key_sample,
    key_position,
    key_head,
    value_sample,
    value_position,
    value_head,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Gated delta rule kernel, before the scan: T, ``W = T beta r k`` and ``U = T beta V`` of a chunk.

    Args:
        solved: [H, M, C, C], out: T.
        corrections: [H, M, C, K], out: W.
        changes: [H, M, C, V], out: U.
        ends: float32 [H, M, C], out: decay from each position to the end of the chunk, divided by the key's norm.
        keeps: float32 [H, M], out: decay of the state by the chunk.
        key: [B, S, N / SHARED, D_k].
        value: [B, S, N, D_v].
        decay: [B, S, N], contiguous.
        beta: [B, S, N], contiguous.
        documents: int64 [B, S], contiguous; unused without ``DOCUMENTS``.
        length: S.
        chunks: M.
        heads: N.
        key_sample: stride of the keys in dimension 0.
        key_position: stride of the keys in dimension 1.
        key_head: stride of the keys in dimension 2; 1 is the stride in dimension 3.
        value_sample: stride of the values in dimension 0.
        value_position: stride of the values in dimension 1.
        value_head: stride of the values in dimension 2; 1 is the stride in dimension 3.
        SHARED: value heads of a key head.
        KEY_DIM: D_k.
        VALUE_DIM: D_v.
        KEYS: K.
        VALUES: V.
        BLOCK: columns of values of an iteration; divides V.
        DOCUMENTS: whether ``documents`` separate documents.
        C: positions of a chunk.
        PRECISION: precision of float32 products with keys and values.
        MERGE: precision of the products that merge blocks of T.
    """
    program = tl.program_id(0)
    chunk, sample, head = program % chunks, program // chunks // heads, program // chunks % heads
    position = chunk * C + tl.arange(0, C)
    total, number, _ = read_decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    strength = load_numbers(beta, sample, position, head, length, heads)
    k = load_block(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_keys = inverse_norms_of(k)
    products = multiply(k, tl.trans(k), PRECISION)
    between = decays_between(total, number, C)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    system = tl.where(row > column, products * between * (strength * of_keys)[:, None] * of_keys[None, :], 0.0)
    inverse = _inverse(system, C, MERGE)
    tile = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(solved + program.to(tl.int64) * C * C + tile, inverse.to(solved.dtype.element_ty))
    read, end, keep = decays_across(total, number, C)
    tl.store(ends + program.to(tl.int64) * C + tl.arange(0, C), end * of_keys)
    tl.store(keeps + program, keep)
    apply_inverse(
        corrections, changes, inverse, k, value, strength, read * of_keys, program, sample, position, head, length,
        value_sample, value_position, value_head, VALUE_DIM, KEYS, VALUES, BLOCK, C, PRECISION,
    )  # fmt: skip


@triton.jit
def pass_states(
    states,
    last,
    changes,
    corrections,
    ends,
    keeps,
    begun,
    key,
    length,
    chunks,
    heads,
    key_sample,
    key_position,
    key_head,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    BEGUN: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gated delta rule kernel, the scan: states of a head, chunk by chunk, for a block of columns of values.

    Args:
        states: [H, M, K, V], out: state before each chunk.
        last: float32 [H, D_k, D_v], out, contiguous: state after the last position; unused without ``BEGUN``.
        changes: [H, M, C, V], in and out: U, replaced by ``U - W S``.
        corrections: [H, M, C, K], W.
        ends: float32 [H, M, C], see :func:`solve_chunks`.
        keeps: float32 [H, M], see :func:`solve_chunks`.
        begun: float32 [H, D_k, D_v], contiguous: state before the first position; unused without ``BEGUN``.
        key: [B, S, N / SHARED, D_k].
        length: S.
        chunks: M.
        heads: N.
        key_sample: stride of the keys in dimension 0.
        key_position: stride of the keys in dimension 1.
        key_head: stride of the keys in dimension 2; 1 is the stride in dimension 3.
        SHARED: value heads of a key head.
        KEY_DIM: D_k.
        VALUE_DIM: D_v.
        KEYS: K.
        VALUES: V.
        BLOCK: columns of values of a program; divides V.
        BEGUN: whether states begin with ``begun``; otherwise they begin with zeros.
        C: positions of a chunk.
        PRECISION: precision of float32 products.
    """
    blocks: tl.constexpr = VALUES // BLOCK
    index = tl.program_id(0) // blocks
    sample, head = index // heads, index % heads
    own = tl.arange(0, C)
    feature, column = tl.arange(0, KEYS), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = index.to(tl.int64) * chunks
    state = tl.zeros((KEYS, BLOCK), tl.float32)
    outer = index.to(tl.int64) * KEY_DIM * VALUE_DIM + feature[:, None] * VALUE_DIM + column[None, :]
    there = (feature < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    if BEGUN:
        state += tl.load(begun + outer, there, other=0.0)
    for chunk in range(chunks):
        place = first + chunk
        before = state.to(states.dtype.element_ty)
        tl.store(states + place * KEYS * VALUES + feature[:, None] * VALUES + column[None, :], before)
        correction = tl.load(corrections + place * C * KEYS + own[:, None] * KEYS + feature[None, :])
        target = changes + place * C * VALUES + own[:, None] * VALUES + column[None, :]
        change = tl.load(target).to(tl.float32) - multiply(correction, before, PRECISION)
        tl.store(target, change.to(changes.dtype.element_ty))
        scale = tl.load(ends + place * C + own)
        turned = load_turned(
            key, sample, chunk * C + own, head // SHARED, length, key_sample, key_position, key_head, KEY_DIM, KEYS
        )
        added = (change * scale[:, None]).to(states.dtype.element_ty)
        state = state * tl.load(keeps + place) + multiply(turned, added, PRECISION)
    if BEGUN:
        tl.store(last + outer, state, there)


@triton.jit
def compute_outputs(
    out,
    states,
    changes,
    query,
    key,
    decay,
    documents,
    scale,
    length,
    chunks,
    heads,
    query_sample,
    query_position,
    query_head,
    key_sample,
    key_position,
    key_head,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gated delta rule kernel, after the scan: outputs of a chunk, ``r q S + P changes``.

    Args:
        out: [B, S, N, D_v], out, contiguous.
        states: [H, M, K, V], see :func:`pass_states`.
        changes: [H, M, C, V], see :func:`pass_states`.
        query: [B, S, N / SHARED, D_k].
        key: [B, S, N / SHARED, D_k].
        decay: [B, S, N], contiguous.
        documents: int64 [B, S], contiguous; unused without ``DOCUMENTS``.
        scale: factor of the normalised queries.
        length: S.
        chunks: M.
        heads: N.
        query_sample: stride of the queries in dimension 0.
        query_position: stride of the queries in dimension 1.
        query_head: stride of the queries in dimension 2; 1 is the stride in dimension 3.
        key_sample: stride of the keys in dimension 0.
        key_position: stride of the keys in dimension 1.
        key_head: stride of the keys in dimension 2; 1 is the stride in dimension 3.
        SHARED: value heads of a key head.
        KEY_DIM: D_k.
        VALUE_DIM: D_v.
        KEYS: K.
        VALUES: V.
        BLOCK: columns of values of an iteration; divides V.
        DOCUMENTS: whether ``documents`` separate documents.
        C: positions of a chunk.
        PRECISION: precision of float32 products.
    """
    program = tl.program_id(0)
    chunk, sample, head = program % chunks, program // chunks // heads, program // chunks % heads
    position = chunk * C + tl.arange(0, C)
    total, number, _ = read_decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    read, _, _ = decays_across(total, number, C)
    q = load_block(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = load_block(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = inverse_norms_of(q) * scale, inverse_norms_of(k)
    products = multiply(q, tl.trans(k), PRECISION) * of_queries[:, None] * of_keys[None, :]
    scores = (products * decays_between(total, number, C)).to(q.dtype)
    own, feature = tl.arange(0, C)[:, None], tl.arange(0, KEYS)[:, None]
    place = program.to(tl.int64)
    for block in tl.static_range(0, VALUES, BLOCK):
        column = block + tl.arange(0, BLOCK)[None, :]
        state = tl.load(states + place * KEYS * VALUES + feature * VALUES + column)
        change = tl.load(changes + place * C * VALUES + own * VALUES + column)
        found = multiply(q, state, PRECISION) * (read * of_queries)[:, None]
        found += multiply(scores, change, PRECISION)
        row = (sample.to(tl.int64) * length + position)[:, None] * heads + head
        there = (position < length)[:, None] & (column < VALUE_DIM)
        tl.store(out + row * VALUE_DIM + column, found.to(out.dtype.element_ty), there)


@triton.jit
def _inverse(system, C: tl.constexpr, MERGE: tl.constexpr):
    """Inverse of ``1 + system`` for a strictly lower triangular matrix, float32 [C, C].

    Blocks of 16 rows on the diagonal are inverted row by row, all at once; then pairs of neighbouring blocks are
    merged: with blocks X and Y on the diagonal and Z below X, the inverse has -Y^-1 Z X^-1 at the place of Z.
    """
    blocks: tl.constexpr = C // _ROWS
    block = tl.arange(0, blocks)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.sum(tl.where(diagonal, tl.reshape(system, (blocks, _ROWS, blocks, _ROWS)), 0.0), 2)
    turned = tl.permute(parts, (0, 2, 1))
    first, second = tl.arange(0, _ROWS)[None, :, None], tl.arange(0, _ROWS)[None, None, :]
    found = tl.zeros((blocks, _ROWS, _ROWS), tl.float32) + tl.where(first == second, 1.0, 0.0)
    for row in tl.static_range(1, _ROWS):
        factors = tl.sum(tl.where(second == row, turned, 0.0), 2)  # row of the system, [blocks, 16]
        change = tl.sum(factors[:, :, None] * found, 1)
        found = tl.where(first == row, found - change[:, None, :], found)
    inverse = tl.reshape(tl.where(diagonal, found[:, :, None, :], 0.0), (C, C))
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(0, 2):  # merges pairs of 16 rows, then pairs of 32 rows
        rows = row // (_ROWS * (level + 1))
        columns = column // (_ROWS * (level + 1))
        below = (rows // 2 == columns // 2) & (rows != columns)
        part = multiply(inverse, tl.where(below, system, 0.0), MERGE)
        inverse -= multiply(part, inverse, MERGE)
    return inverse
