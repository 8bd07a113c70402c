"""Op ``gated_delta_rule``: a state per head that decays and is corrected towards each token's value.

Yang et al. 2024, "Gated Delta Networks", equation 10. The state of a head is a matrix S of D_k x D_v numbers, zero at
the start of each document; with a token's normalised query q and key k, value v, decay exp(g) and strength beta:

    S <- exp(g) S
    S <- S + k beta (v - k^T S)
    output = q^T S / sqrt(D_k)

Shapes: B samples, S positions, K key heads, N value heads (a multiple of K), D_k and D_v features of a key and value
head, C positions of a chunk. The slot's static facts are ``key_dim``, ``value_dim``, ``key_heads`` and ``value_heads``.

Under context parallelism, Gated DeltaNet calls the op ``gated_delta_rule_from`` instead, whose reference is
:func:`chunked_from`: it begins with a given state, and also returns the last state. There, ``value_dim`` includes the
``key_dim`` further features of values that :mod:`d9d_nn.delta.chain` adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

from d9d_nn.ops.chunks import (
    CHUNK,
    FLOATS,
    affine_scan,
    counted,
    decays_between,
    in_chunks,
    reach,
    starts_of,
    without_autocast,
)

__all__ = ["CHUNK", "EPS", "chunked", "chunked_from", "counted", "gated_delta_rule", "without_autocast"]

#: Constant that is added to the sum of squares of a query or key, before the root.
EPS = 1e-6


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Reference of the gated delta rule: computes one position after another, in float32 or wider.

    Value head n reads the query and key head ``n // (N / K)``. Queries and keys are divided by their Euclidean norm.

    Args:
        query: [B, S, K, D_k].
        key: [B, S, K, D_k].
        value: [B, S, N, D_v].
        decay: float32 [B, S, N], g; not positive.
        beta: [B, S, N], strength of the correction.
        documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.

    Returns:
        [B, S, N, D_v] in the dtype of ``value``.
    """
    wide_query, wide_key, wide_value, wide_beta = _prepared(query, key, value, beta)
    starts = starts_of(documents, decay)
    samples, length, heads, _ = value.shape
    state = wide_value.new_zeros(samples, heads, key.shape[-1], value.shape[-1])
    outputs = []
    with without_autocast(value):
        for position in range(length):
            one_key, keep = wide_key[:, position], decay[:, position].to(wide_key.dtype).exp()
            if starts is not None:
                keep = keep.masked_fill(starts[:, position, None], 0)
            state = state * keep[..., None, None]
            known = torch.einsum("bnd,bndv->bnv", one_key, state)
            change = wide_beta[:, position, :, None] * (wide_value[:, position] - known)
            state = state + torch.einsum("bnd,bnv->bndv", one_key, change)
            outputs.append(torch.einsum("bnd,bndv->bnv", wide_query[:, position], state))
    return torch.stack(outputs, dim=1).to(value.dtype)


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Gated delta rule by matrix products within chunks, see :func:`gated_delta_rule`; exact at document borders.

    Within a chunk, with the cumulated decays G, the changes U of all positions solve a triangular system, in which a
    position sees the earlier positions of its document (Yang et al. 2024, section 3.3):

        (1 + A) U = beta (V - exp(G) K S),  A[t, s] = beta[t] exp(G[t] - G[s]) k[t] . k[s] for s < t

    Only the document that continues from the previous chunk reads that chunk's state S, and only the last document of a
    chunk passes a state on.

    Args:
        query: [B, S, K, D_k].
        key: [B, S, K, D_k].
        value: [B, S, N, D_v].
        decay: float32 [B, S, N].
        beta: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.
        chunk: C.

    Returns:
        [B, S, N, D_v] in the dtype of ``value``.
    """
    return chunked_from(None, query, key, value, decay, beta, documents, chunk=chunk)[0].to(value.dtype)


def chunked_from(
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks, see :func:`chunked`, from a given state; also returns the last state.

    Reference of the op ``gated_delta_rule_from``, which the models call with a state and without ``chunk``.

    Args:
        state: state that the first document of each sample continues, float32 or wider [B, N, D_k, D_v]; ``None`` for
            zeros.
        query: [B, S, K, D_k].
        key: [B, S, K, D_k].
        value: [B, S, N, D_v].
        decay: float32 [B, S, N].
        beta: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.
        chunk: C.

    Returns:
        Outputs [B, S, N, D_v] and the state after the last position [B, N, D_k, D_v], both float32 or wider.
    """
    with without_autocast(value):
        return _chunks_from(state, *_prepared(query, key, value, beta), decay, documents, min(chunk, value.shape[1]))


def supports(signature: OpSignature) -> Decision:
    """Accept floating-point dtypes on CPU and CUDA; preferred to the reference, which loops over the positions."""
    if signature.dtype not in FLOATS:
        return Decision(accept=False, reason=f"dtype {signature.dtype} is not one of {', '.join(FLOATS)}")
    if signature.device not in ("cpu", "cuda"):
        return Decision(accept=False, reason=f"triangular systems are not solved on {signature.device}")
    return Decision(accept=True, reason=f"products within chunks of {CHUNK} positions", priority=10)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``chunked``; its function is the same for every signature."""
    return chunked


def _chunks_from(
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor,
    documents: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`chunked_from` of inputs that :func:`_prepared` returned; all have N heads."""
    samples, length, heads, width = value.shape
    # The padding after the last position has no decay and no strength, so it does not change the state.
    padding = -length % chunk
    parts = (query, key, value, beta, decay.to(value.dtype))
    q, k, v, b, g = (in_chunks(part, padding, chunk) for part in parts)
    # smaller decays are factors of 0, too; so sums stay finite and precise
    g = g.clamp(min=math.log(torch.finfo(g.dtype).tiny))
    total = g.cumsum(-1)  # [B, N, chunks, C]
    same, reads = reach(documents, padding, chunk, samples, total)
    gamma = decays_between(g, same)
    read = (total.exp() * reads)[..., None]  # decay of the previous chunk's state until each position
    system = b[..., None] * gamma * (k @ k.mT)
    right = b[..., None] * torch.cat([v, k * read], dim=-1)
    # The solver reads only the entries below the diagonal, and takes the diagonal as ones.
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    changes, corrections = solved.split([width, solved.shape[-1] - width], dim=-1)
    scores, queries = gamma * (q @ k.mT), q * read
    keys = k * gamma[..., -1, :, None]
    keep = read[..., -1:, :]
    state = v.new_zeros(samples, heads, k.shape[-1], width) if state is None else state
    # Only states are computed chunk by chunk, each an affine function of the last; one product gives all outputs.
    factors = keep * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - keys.mT @ corrections
    states = affine_scan(factors, keys.mT @ changes, state)
    before = states[:, :, :-1]
    out = queries @ before + scores @ (changes - corrections @ before)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1]


def _prepared(query: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised scaled queries, normalised keys (both for each value head), values and beta; all float32 or wider."""
    wide = torch.promote_types(value.dtype, torch.float32)
    shared = value.shape[2] // key.shape[2]

    def normalised(x: Tensor) -> Tensor:
        x = x.to(wide)
        return (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()).repeat_interleave(shared, dim=2)

    return normalised(query) * key.shape[-1] ** -0.5, normalised(key), value.to(wide), beta.to(wide)
