"""Kernels of the gated delta rule, see :mod:`d9d_triton.gated_delta_rule`, which has the equations and the symbols.

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
#: Rows of the diagonal blocks that are inverted row by row.
_ROWS = tl.constexpr(16)
#: Constant that is added to the sum of squares of a query or key, before the root: ``EPS`` of the op.
_EPS = tl.constexpr(1e-6)
#: Smallest logarithm of a decay, the logarithm of the smallest normal float32; smaller decays are factors of 0, too.
_LEAST = tl.constexpr(-87.33654475055310)


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
    total, number, _ = _decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    strength = _of_positions(beta, sample, position, head, length, heads)
    k = _load(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_keys = _inverse_norms(k)
    products = _dot(k, tl.trans(k), PRECISION)
    between = _between(total, number, C)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    system = tl.where(row > column, products * between * (strength * of_keys)[:, None] * of_keys[None, :], 0.0)
    inverse = _inverse(system, C, MERGE)
    tile = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(solved + program.to(tl.int64) * C * C + tile, inverse.to(solved.dtype.element_ty))
    read, end, keep = _ends(total, number, C)
    tl.store(ends + program.to(tl.int64) * C + tl.arange(0, C), end * of_keys)
    tl.store(keeps + program, keep)
    _apply(
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
        change = tl.load(target).to(tl.float32) - _dot(correction, before, PRECISION)
        tl.store(target, change.to(changes.dtype.element_ty))
        scale = tl.load(ends + place * C + own)
        turned = _load_turned(
            key, sample, chunk * C + own, head // SHARED, length, key_sample, key_position, key_head, KEY_DIM, KEYS
        )
        added = (change * scale[:, None]).to(states.dtype.element_ty)
        state = state * tl.load(keeps + place) + _dot(turned, added, PRECISION)
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
    total, number, _ = _decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    read, _, _ = _ends(total, number, C)
    q = _load(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = _load(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = _inverse_norms(q) * scale, _inverse_norms(k)
    products = _dot(q, tl.trans(k), PRECISION) * of_queries[:, None] * of_keys[None, :]
    scores = (products * _between(total, number, C)).to(q.dtype)
    own, feature = tl.arange(0, C)[:, None], tl.arange(0, KEYS)[:, None]
    place = program.to(tl.int64)
    for block in tl.static_range(0, VALUES, BLOCK):
        column = block + tl.arange(0, BLOCK)[None, :]
        state = tl.load(states + place * KEYS * VALUES + feature * VALUES + column)
        change = tl.load(changes + place * C * VALUES + own * VALUES + column)
        found = _dot(q, state, PRECISION) * (read * of_queries)[:, None]
        found += _dot(scores, change, PRECISION)
        row = (sample.to(tl.int64) * length + position)[:, None] * heads + head
        there = (position < length)[:, None] & (column < VALUE_DIM)
        tl.store(out + row * VALUE_DIM + column, found.to(out.dtype.element_ty), there)


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
        ends: float32 [H, M, C], out, see :func:`solve_chunks`.
        keeps: float32 [H, M], out, see :func:`solve_chunks`.
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
    total, number, _ = _decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    strength = _of_positions(beta, sample, position, head, length, heads)
    q = _load(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = _load(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = _inverse_norms(q) * scale, _inverse_norms(k)
    read, end, keep = _ends(total, number, C)
    place = program.to(tl.int64)
    tl.store(ends + place * C + tl.arange(0, C), end * of_keys)
    tl.store(reads + place * C + tl.arange(0, C), read * of_queries)
    tl.store(keeps + program, keep)
    own = tl.arange(0, C)[:, None]
    # The products of keys and queries are computed as their transpose, so that no product reads a transposed result.
    products = _dot(k, tl.trans(q), PRECISION) * of_keys[:, None] * of_queries[None, :]
    turned = (products * _between_turned(total, number, C)).to(k.dtype)
    for block in tl.static_range(0, VALUES, BLOCK):
        column = block + tl.arange(0, BLOCK)[None, :]
        arrived = _load(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, block, VALUE_DIM, BLOCK
        ).to(k.dtype)
        found = _dot(turned, arrived, PRECISION)
        target = grad_changes + place * C * VALUES + own * VALUES + column
        tl.store(target, found.to(grad_changes.dtype.element_ty))
    inverse = tl.load(solved + place * C * C + own * C + tl.arange(0, C)[None, :]).to(tl.float32)
    _apply(
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
        ends: float32 [H, M, C], see :func:`solve_chunks`.
        keeps: float32 [H, M], see :func:`solve_chunks`.
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
        k = _load(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
        target = grad_changes + place * C * VALUES + own[:, None] * VALUES + column[None, :]
        scale = tl.load(ends + place * C + own)
        change = tl.load(target).to(tl.float32) + _dot(k, after, PRECISION) * scale[:, None]
        narrow = change.to(grad_changes.dtype.element_ty)
        tl.store(target, narrow)
        arrived = _load(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, begin, VALUE_DIM, BLOCK
        )
        read = tl.load(reads + place * C + own)
        weighted = (arrived.to(tl.float32) * read[:, None]).to(narrow.dtype)
        turned = _load_turned(
            query, sample, position, head // SHARED, length, query_sample, query_position, query_head, KEY_DIM, KEYS
        )
        correction = tl.load(corrections + place * C * KEYS + own[None, :] * KEYS + feature[:, None])
        total = total * tl.load(keeps + place) + _dot(turned, weighted, PRECISION)
        total -= _dot(correction, narrow, PRECISION)
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
        states: [H, M, K, V], see :func:`pass_states`.
        grad_states: [H, M, K, V], see :func:`pass_gradients`.
        changes: [H, M, C, V], see :func:`pass_states`.
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
    strength = _of_positions(beta, sample, position, head, length, heads)
    by_queries, by_keys, of_read, of_known, of_end, of_strength, of_keep = _over_values(
        grad_value, grad, states, grad_states, changes, grad_changes, solved, value, strength, program, sample,
        position, head, rows, length, grad_sample, grad_position, grad_head, value_sample, value_position, value_head,
        VALUE_DIM, KEYS, VALUES, BLOCK, C, PRECISION,
    )  # fmt: skip
    total, number, starts = _decays(decay, documents, sample, position, head, length, heads, DOCUMENTS)
    constant = (starts & (position > 0)) if BEGUN else starts  # these decays have no effect
    read, end, keep = _ends(total, number, C)
    q = _load(
        query, sample, position, head // SHARED, length, query_sample, query_position, query_head, 0, KEY_DIM, KEYS
    )
    k = _load(key, sample, position, head // SHARED, length, key_sample, key_position, key_head, 0, KEY_DIM, KEYS)
    of_queries, of_keys = _inverse_norms(q), _inverse_norms(k)
    between = _between(total, number, C)
    by_queries *= between
    # gradients of the entries of A, which lie below the diagonal, times the decays
    by_keys = tl.where(own > later, -by_keys * between, 0.0)
    products = _dot(k, tl.trans(k), PRECISION) * of_keys[:, None] * of_keys[None, :]
    scores = _dot(q, tl.trans(k), PRECISION) * (scale * of_queries)[:, None] * of_keys[None, :]
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
    g = _of_positions(decay, sample, position, head, length, heads)
    of_decay = tl.where(constant | (g < _LEAST), 0.0, of_decay)
    tl.store(grad_decay + rows, of_decay.to(grad_decay.dtype.element_ty), inside)

    there = inside[:, None] & (feature < KEY_DIM)[None, :]
    normed = of_read * read[:, None]
    normed += _dot((by_queries * of_keys[None, :]).to(k.dtype), k, PRECISION)
    found = _of_raw(normed, wide_q, of_queries) * scale
    tl.store(grad_query + rows[:, None] * KEY_DIM + feature[None, :], found.to(grad_query.dtype.element_ty), there)
    normed = of_end * end[:, None] - of_known * (strength * read)[:, None]
    weighted = (by_queries * (scale * of_queries)[:, None]).to(q.dtype)
    normed += _dot(tl.trans(weighted), q, PRECISION)
    half = by_keys * strength[:, None]
    both = ((half + tl.trans(half)) * of_keys[None, :]).to(k.dtype)
    normed += _dot(both, k, PRECISION)
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
        wide = _dot(turned, grad_change, PRECISION)
        right = wide.to(turned.dtype)
        there = (position < length)[:, None] & (column < VALUE_DIM)[None, :]
        target = grad_value + rows[:, None] * VALUE_DIM + column[None, :]
        tl.store(target, (wide * strength[:, None]).to(grad_value.dtype.element_ty), there)
        v = _load(
            value, sample, position, head, length, value_sample, value_position, value_head, block, VALUE_DIM, BLOCK
        )
        of_strength += tl.sum(wide * v.to(tl.float32), 1)
        arrived = _load(
            grad, sample, position, head, length, grad_sample, grad_position, grad_head, block, VALUE_DIM, BLOCK
        ).to(turned.dtype)
        by_queries += _dot(arrived, tl.trans(change), PRECISION)
        by_keys += _dot(right, tl.trans(change), PRECISION)
        square = place * KEYS * VALUES + feature[:, None] * VALUES + column[None, :]
        state, grad_state = tl.load(states + square), tl.load(grad_states + square)
        of_keep += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        of_read += _dot(arrived, tl.trans(state), PRECISION)
        of_known += _dot(right, tl.trans(state), PRECISION)
        of_end += _dot(change, tl.trans(grad_state), PRECISION)
    return by_queries, by_keys, of_read, of_known, of_end, of_strength, of_keep


@triton.jit
def _apply(
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
    correction = _dot(factor, k, PRECISION)
    target = corrections + place * C * KEYS + own * KEYS + tl.arange(0, KEYS)[None, :]
    tl.store(target, correction.to(corrections.dtype.element_ty))
    factor = (inverse * strength[None, :]).to(k.dtype)
    for block in tl.static_range(0, VALUES, BLOCK):
        v = _load(
            value, sample, position, head, length, value_sample, value_position, value_head, block, VALUE_DIM, BLOCK
        )
        change = _dot(factor, v, PRECISION)
        target = changes + place * C * VALUES + own * VALUES + block + tl.arange(0, BLOCK)[None, :]
        tl.store(target, change.to(changes.dtype.element_ty))


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
        part = _dot(inverse, tl.where(below, system, 0.0), MERGE)
        inverse -= _dot(part, inverse, MERGE)
    return inverse


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Matrix product, float32; PRECISION is the precision of the product of float32 matrices."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _decays(decay, documents, sample, position, head, length, heads, DOCUMENTS: tl.constexpr):
    """Cumulated logarithms of decays and borders of documents within a chunk, for its positions [C].

    Returns:
        Cumulated logarithms, float64 [C]: differences keep the precision of float32 even if other documents have large
        decays. Number of borders from the chunk's first position to each position, int32 [C]; 0 where a position
        continues the document that ended the previous chunk. Whether each position is the first one of a document.
    """
    g = tl.maximum(_of_positions(decay, sample, position, head, length, heads), _LEAST)
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
def _between(total, number, C: tl.constexpr):
    """Decays from position s to position t of a chunk, float32 [C (t), C (s)]; 0 where t does not see s."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    sees = (row >= column) & (number[:, None] == number[None, :])
    return tl.exp(tl.where(sees, (total[:, None] - total[None, :]).to(tl.float32), float("-inf")))


@triton.jit
def _between_turned(total, number, C: tl.constexpr):
    """Transpose of :func:`_between`, float32 [C (s), C (t)]."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    sees = (row <= column) & (number[:, None] == number[None, :])
    return tl.exp(tl.where(sees, (total[None, :] - total[:, None]).to(tl.float32), float("-inf")))


@triton.jit
def _ends(total, number, C: tl.constexpr):
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
def _inverse_norms(x):
    """Inverse Euclidean norms of rows, float32 [C]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + _EPS)


@triton.jit
def _of_raw(grad, wide, inverse):
    """Gradient of rows from the gradient of their normalised values, which loses its part along the rows.

    Shapes: grad and wide (the rows) are float32 [C, K], inverse (the inverse norms) is float32 [C].
    """
    along = tl.sum(grad * wide, 1) * inverse * inverse
    return (grad - wide * along[:, None]) * inverse[:, None]


@triton.jit
def _of_positions(x, sample, position, head, length, heads):
    """Load numbers of a head from contiguous x [B, S, N], float32 [C]; zeros after the last position."""
    row = (sample.to(tl.int64) * length + position) * heads + head
    return tl.load(x + row, position < length, other=0.0).to(tl.float32)


@triton.jit
def _load(
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
def _load_turned(
    x, sample, position, head, length, of_sample, of_position, of_head, FEATURES: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the transpose of :func:`_load` from the first feature on: [BLOCK, C]; zeros outside."""
    feature = tl.arange(0, BLOCK)
    base = x + sample.to(tl.int64) * of_sample + head.to(tl.int64) * of_head
    there = (position < length)[None, :] & (feature < FEATURES)[:, None]
    return tl.load(base + position.to(tl.int64)[None, :] * of_position + feature[:, None], there, other=0.0)
