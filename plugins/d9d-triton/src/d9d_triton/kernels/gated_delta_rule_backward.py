"""Kernels of the backward of the gated delta rule; :mod:`d9d_triton.gated_delta_rule` has equations and symbols.

Shapes: B samples, S positions, N value heads, H = B N heads of all samples, M chunks of a sample, C positions of a
chunk, D_k and D_v features of a key and value head, K and V the same numbers, padded as tiles need it. A program of a
chunk handles one chunk of one head; programs are numbered head by head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.kernels.gated_delta_rule_parts import (
    LEAST_DECAY,
    apply_inverse,
    decays_across,
    decays_between,
    inverse_norms_of,
    load_block,
    load_numbers,
    load_turned,
    multiply,
    read_decays,
    turned_decays_between,
)


@triton.jit
def prepare_gradients(
    grad_changes,
    corrections,
    changes,
    ends,
    keeps,
    reads,
    grad,
    solved,
    query,
    key,
    value,
    decay,
    beta,
    documents,
    scale,
    length,
    chunks,
    heads,
    grad_sample,
    grad_position,
    grad_head,
    query_sample,
    query_position,
    query_head,
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
):
    """Gated delta rule kernel, before the scans of the backward: W, U and ``P^T grad`` of a chunk.

    Args:
        grad_changes: [H, M, C, V], out: ``P^T grad``, gradient of the changes by the outputs of the same chunk.
        corrections: [H, M, C, K], out: W.
        changes: [H, M, C, V], out: U.
        ends: float32 [H, M, C], out, see :func:`~d9d_triton.kernels.gated_delta_rule.solve_chunks`.
        keeps: float32 [H, M], out, see :func:`~d9d_triton.kernels.gated_delta_rule.solve_chunks`.
        reads: float32 [H, M, C], out: factor of each query in its product with the state before the chunk.
        grad: [B, S, N, D_v], gradient of the outputs.
        solved: [H, M, C, C], T.
        query: [B, S, N / SHARED, D_k].
        key: [B, S, N / SHARED, D_k].
        value: [B, S, N, D_v].
        decay: [B, S, N], contiguous.
        beta: [B, S, N], contiguous.
        documents: int64 [B, S], contiguous; unused without ``DOCUMENTS``.
        scale: factor of the normalised queries.
        length: S.
        chunks: M.
        heads: N.
        grad_sample: stride of the gradient in dimension 0.
        grad_position: stride of the gradient in dimension 1.
        grad_head: stride of the gradient in dimension 2; 1 is the stride in dimension 3.
        query_sample: stride of the queries in dimension 0.
        query_position: stride of the queries in dimension 1.
        query_head: stride of the queries in dimension 2; 1 is the stride in dimension 3.
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
        PRECISION: precision of float32 products.
    """
    program = tl.program_id(0)
    chunk, sample, head = program % chunks, program // chunks // heads, program // chunks % heads
    position = chunk * C + tl.arange(0, C)
    total, number, _ = read_decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    strength = load_numbers(beta, sample, position, head, length, heads)
    q = load_block(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = load_block(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = inverse_norms_of(q) * scale, inverse_norms_of(k)
    read, end, keep = decays_across(total, number, C)
    place = program.to(tl.int64)
    tl.store(ends + place * C + tl.arange(0, C), end * of_keys)
    tl.store(reads + place * C + tl.arange(0, C), read * of_queries)
    tl.store(keeps + program, keep)
    own = tl.arange(0, C)[:, None]
    # The products of keys and queries are computed as their transpose, so that no product reads a transposed result.
    products = multiply(k, tl.trans(q), PRECISION) * of_keys[:, None] * of_queries[None, :]
    turned = (products * turned_decays_between(total, number, C)).to(k.dtype)
    for block in tl.static_range(0, VALUES, BLOCK):
        column = block + tl.arange(0, BLOCK)[None, :]
        arrived = load_block(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, block, VALUE_DIM, BLOCK
        ).to(k.dtype)
        found = multiply(turned, arrived, PRECISION)
        target = grad_changes + place * C * VALUES + own * VALUES + column
        tl.store(target, found.to(grad_changes.dtype.element_ty))
    inverse = tl.load(solved + place * C * C + own * C + tl.arange(0, C)[None, :]).to(tl.float32)
    apply_inverse(
        corrections, changes, inverse, k, value, strength, read * of_keys, program, sample, position, head, length,
        value_sample, value_position, value_head, VALUE_DIM, KEYS, VALUES, BLOCK, C, PRECISION,
    )  # fmt: skip


@triton.jit
def pass_gradients(
    grad_states,
    grad_begun,
    grad_changes,
    corrections,
    ends,
    keeps,
    reads,
    grad_last,
    grad,
    query,
    key,
    length,
    chunks,
    heads,
    grad_sample,
    grad_position,
    grad_head,
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
    BEGUN: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gated delta rule kernel, the scan of the backward: gradients of a head's states, the last chunk first.

    Args:
        grad_states: [H, M, K, V], out: gradient of the state after each chunk.
        grad_begun: float32 [H, D_k, D_v], out, contiguous: gradient of the first state; unused without ``BEGUN``.
        grad_changes: [H, M, C, V], in and out: ``P^T grad``, replaced by the whole gradient of the changes.
        corrections: [H, M, C, K], W.
        ends: float32 [H, M, C], see :func:`~d9d_triton.kernels.gated_delta_rule.solve_chunks`.
        keeps: float32 [H, M], see :func:`~d9d_triton.kernels.gated_delta_rule.solve_chunks`.
        reads: float32 [H, M, C], see :func:`prepare_gradients`.
        grad_last: float32 [H, D_k, D_v], contiguous: gradient of the last state; unused without ``BEGUN``.
        grad: [B, S, N, D_v], gradient of the outputs.
        query: [B, S, N / SHARED, D_k].
        key: [B, S, N / SHARED, D_k].
        length: S.
        chunks: M.
        heads: N.
        grad_sample: stride of the gradient in dimension 0.
        grad_position: stride of the gradient in dimension 1.
        grad_head: stride of the gradient in dimension 2; 1 is the stride in dimension 3.
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
        BLOCK: columns of values of a program; divides V.
        BEGUN: whether the first state was given, and the last state has a gradient.
        C: positions of a chunk.
        PRECISION: precision of float32 products.
    """
    blocks: tl.constexpr = VALUES // BLOCK
    index = tl.program_id(0) // blocks
    sample, head = index // heads, index % heads
    own = tl.arange(0, C)
    begin = tl.program_id(0) % blocks * BLOCK
    feature, column = tl.arange(0, KEYS), begin + tl.arange(0, BLOCK)
    first = index.to(tl.int64) * chunks
    total = tl.zeros((KEYS, BLOCK), tl.float32)
    outer = index.to(tl.int64) * KEY_DIM * VALUE_DIM + feature[:, None] * VALUE_DIM + column[None, :]
    there = (feature < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    if BEGUN:
        total += tl.load(grad_last + outer, there, other=0.0)
    for done in range(chunks):
        chunk = chunks - 1 - done
        place, position = first + chunk, chunk * C + own
        after = total.to(grad_states.dtype.element_ty)
        tl.store(grad_states + place * KEYS * VALUES + feature[:, None] * VALUES + column[None, :], after)
        k = load_block(
            key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS
        )
        target = grad_changes + place * C * VALUES + own[:, None] * VALUES + column[None, :]
        scale = tl.load(ends + place * C + own)
        change = tl.load(target).to(tl.float32) + multiply(k, after, PRECISION) * scale[:, None]
        narrow = change.to(grad_changes.dtype.element_ty)
        tl.store(target, narrow)
        arrived = load_block(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, begin, VALUE_DIM, BLOCK
        )
        read = tl.load(reads + place * C + own)
        weighted = (arrived.to(tl.float32) * read[:, None]).to(narrow.dtype)
        turned = load_turned(
            query, sample, position, head // SHARED, length, query_sample, query_position, query_head, KEY_DIM, KEYS
        )
        correction = tl.load(corrections + place * C * KEYS + own[None, :] * KEYS + feature[:, None])
        total = total * tl.load(keeps + place) + multiply(turned, weighted, PRECISION)
        total -= multiply(correction, narrow, PRECISION)
    if BEGUN:
        tl.store(grad_begun + outer, total, there)


@triton.jit
def differentiate(
    grad_query,
    grad_key,
    grad_value,
    grad_decay,
    grad_beta,
    grad,
    states,
    grad_states,
    changes,
    grad_changes,
    solved,
    query,
    key,
    value,
    decay,
    beta,
    documents,
    scale,
    length,
    chunks,
    heads,
    grad_sample,
    grad_position,
    grad_head,
    query_sample,
    query_position,
    query_head,
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
    BEGUN: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gated delta rule kernel, after the scans of the backward: gradients of all inputs of a chunk.

    Args:
        grad_query: [B, S, N, D_k], out, contiguous: gradient of the queries by each value head.
        grad_key: [B, S, N, D_k], out, contiguous: gradient of the keys by each value head.
        grad_value: [B, S, N, D_v], out, contiguous.
        grad_decay: [B, S, N], out, contiguous.
        grad_beta: [B, S, N], out, contiguous.
        grad: [B, S, N, D_v], gradient of the outputs.
        states: [H, M, K, V], see :func:`~d9d_triton.kernels.gated_delta_rule.pass_states`.
        grad_states: [H, M, K, V], see :func:`pass_gradients`.
        changes: [H, M, C, V], see :func:`~d9d_triton.kernels.gated_delta_rule.pass_states`.
        grad_changes: [H, M, C, V], see :func:`pass_gradients`.
        solved: [H, M, C, C], T.
        query: [B, S, N / SHARED, D_k].
        key: [B, S, N / SHARED, D_k].
        value: [B, S, N, D_v].
        decay: [B, S, N], contiguous.
        beta: [B, S, N], contiguous.
        documents: int64 [B, S], contiguous; unused without ``DOCUMENTS``.
        scale: factor of the normalised queries.
        length: S.
        chunks: M.
        heads: N.
        grad_sample: stride of the gradient in dimension 0.
        grad_position: stride of the gradient in dimension 1.
        grad_head: stride of the gradient in dimension 2; 1 is the stride in dimension 3.
        query_sample: stride of the queries in dimension 0.
        query_position: stride of the queries in dimension 1.
        query_head: stride of the queries in dimension 2; 1 is the stride in dimension 3.
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
        BEGUN: whether the first position of a sample decays a given state.
        C: positions of a chunk.
        PRECISION: precision of float32 products.
    """
    program = tl.program_id(0)
    chunk, sample, head = program % chunks, program // chunks // heads, program // chunks % heads
    position = chunk * C + tl.arange(0, C)
    inside = position < length
    own, later = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    feature = tl.arange(0, KEYS)
    rows = (sample.to(tl.int64) * length + position) * heads + head
    strength = load_numbers(beta, sample, position, head, length, heads)
    by_queries, by_keys, of_read, of_known, of_end, of_strength, of_keep = _over_values(
        grad_value, grad, states, grad_states, changes, grad_changes, solved, value, strength, program, sample,
        position, head, rows, length, grad_sample, grad_position, grad_head, value_sample, value_position, value_head,
        VALUE_DIM, KEYS, VALUES, BLOCK, C, PRECISION,
    )  # fmt: skip
    total, number, starts = read_decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    constant = (starts & (position > 0)) if BEGUN else starts  # these decays have no effect
    read, end, keep = decays_across(total, number, C)
    q = load_block(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = load_block(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = inverse_norms_of(q), inverse_norms_of(k)
    between = decays_between(total, number, C)
    by_queries *= between
    # gradients of the entries of A, which lie below the diagonal, times the decays
    by_keys = tl.where(own > later, -by_keys * between, 0.0)
    products = multiply(k, tl.trans(k), PRECISION) * of_keys[:, None] * of_keys[None, :]
    scores = multiply(q, tl.trans(k), PRECISION) * (scale * of_queries)[:, None] * of_keys[None, :]
    # gradients of the logarithms of the decays between two positions, the parts of queries and of A
    pairs = by_queries * scores + by_keys * products * strength[:, None]
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    through_read = read * scale * of_queries * tl.sum(wide_q * of_read, 1)
    through_known = read * of_keys * tl.sum(wide_k * of_known, 1)
    through_end = end * of_keys * tl.sum(wide_k * of_end, 1)
    of_strength += tl.sum(by_keys * products, 1) - through_known
    tl.store(grad_beta + rows, of_strength.to(grad_beta.dtype.element_ty), inside)

    # In float64, because pairs of positions that both follow a position must cancel out there.
    of_total = tl.sum(pairs.to(tl.float64), 1) - tl.sum(pairs.to(tl.float64), 0)
    of_total += (through_read - strength * through_known - through_end).to(tl.float64)
    of_last = tl.sum(through_end.to(tl.float64), 0) + (keep * tl.sum(of_keep, 0)).to(tl.float64)
    of_total += tl.where(tl.arange(0, C) == C - 1, of_last, 0.0)
    # sums of each position and of the positions that follow it in its document
    follows = (own <= later) & (number[:, None] == number[None, :])
    of_decay = tl.sum(tl.where(follows, of_total[None, :], 0.0), 1).to(tl.float32)
    g = load_numbers(decay, sample, position, head, length, heads)
    of_decay = tl.where(constant | (g < LEAST_DECAY), 0.0, of_decay)
    tl.store(grad_decay + rows, of_decay.to(grad_decay.dtype.element_ty), inside)

    there = inside[:, None] & (feature < KEY_DIM)[None, :]
    normed = of_read * read[:, None]
    normed += multiply((by_queries * of_keys[None, :]).to(k.dtype), k, PRECISION)
    found = _of_raw(normed, wide_q, of_queries) * scale
    tl.store(grad_query + rows[:, None] * KEY_DIM + feature[None, :], found.to(grad_query.dtype.element_ty), there)
    normed = of_end * end[:, None] - of_known * (strength * read)[:, None]
    weighted = (by_queries * (scale * of_queries)[:, None]).to(q.dtype)
    normed += multiply(tl.trans(weighted), q, PRECISION)
    half = by_keys * strength[:, None]
    both = ((half + tl.trans(half)) * of_keys[None, :]).to(k.dtype)
    normed += multiply(both, k, PRECISION)
    found = _of_raw(normed, wide_k, of_keys)
    tl.store(grad_key + rows[:, None] * KEY_DIM + feature[None, :], found.to(grad_key.dtype.element_ty), there)


@triton.jit
def _over_values(
    grad_value,
    grad,
    states,
    grad_states,
    changes,
    grad_changes,
    solved,
    value,
    strength,
    program,
    sample,
    position,
    head,
    rows,
    length,
    grad_sample,
    grad_position,
    grad_head,
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
    """Store the gradient of a chunk's values, and sum products over the features of values for the other gradients.

    Returns, float32, with X the gradient of the right side of the triangular system: ``grad changes^T`` and
    ``X changes^T`` [C, C]; ``grad S^T``, ``X S^T`` and ``changes dS^T`` [C, K]; sums of X times values [C]; sums of S
    times dS [K].
    """
    place, own = program.to(tl.int64), tl.arange(0, C)[:, None]
    feature = tl.arange(0, KEYS)
    turned = tl.load(solved + place * C * C + tl.arange(0, C)[None, :] * C + own)  # transpose of T
    by_queries, by_keys = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    of_read = tl.zeros((C, KEYS), tl.float32)
    of_known = tl.zeros((C, KEYS), tl.float32)
    of_end = tl.zeros((C, KEYS), tl.float32)
    of_strength = tl.zeros((C,), tl.float32)
    of_keep = tl.zeros((KEYS,), tl.float32)
    for block in range(0, VALUES, BLOCK):
        column = block + tl.arange(0, BLOCK)
        tile = place * C * VALUES + own * VALUES + column[None, :]
        change, grad_change = tl.load(changes + tile), tl.load(grad_changes + tile)
        wide = multiply(turned, grad_change, PRECISION)
        right = wide.to(turned.dtype)
        there = (position < length)[:, None] & (column < VALUE_DIM)[None, :]
        target = grad_value + rows[:, None] * VALUE_DIM + column[None, :]
        tl.store(target, (wide * strength[:, None]).to(grad_value.dtype.element_ty), there)
        v = load_block(
            value, sample, position, head, length, value_sample, value_position, value_head, block, VALUE_DIM, BLOCK
        )
        of_strength += tl.sum(wide * v.to(tl.float32), 1)
        arrived = load_block(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, block, VALUE_DIM, BLOCK
        ).to(turned.dtype)
        by_queries += multiply(arrived, tl.trans(change), PRECISION)
        by_keys += multiply(right, tl.trans(change), PRECISION)
        square = place * KEYS * VALUES + feature[:, None] * VALUES + column[None, :]
        state, grad_state = tl.load(states + square), tl.load(grad_states + square)
        of_keep += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        of_read += multiply(arrived, tl.trans(state), PRECISION)
        of_known += multiply(right, tl.trans(state), PRECISION)
        of_end += multiply(change, tl.trans(grad_state), PRECISION)
    return by_queries, by_keys, of_read, of_known, of_end, of_strength, of_keep


@triton.jit
def _of_raw(grad, wide, inverse):
    """Gradient of rows from the gradient of their normalised values, which loses its part along the rows.

    Shapes: grad and wide (the rows) are float32 [C, K], inverse (the inverse norms) is float32 [C].
    """
    along = tl.sum(grad * wide, 1) * inverse * inverse
    return (grad - wide * along[:, None]) * inverse[:, None]
