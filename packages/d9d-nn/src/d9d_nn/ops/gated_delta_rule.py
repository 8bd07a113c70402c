"""Op ``gated_delta_rule``: a state per head that decays and is corrected towards each token's value.

Yang et al. 2024, "Gated Delta Networks", equation 10. The state of a head is a matrix S of D_k x D_v numbers, zero at
the start of each document; with the normalised key k, the value v, the decay exp(g) and the strength beta of a token:

    S <- exp(g) S
    S <- S + k beta (v - k^T S)
    output = q^T S / sqrt(D_k)

Shapes: B samples, S positions, K key heads, N value heads (a multiple of K), D_k and D_v features of a key and value
head, C positions of a chunk. The slot's static facts are ``key_dim``, ``value_dim``, ``key_heads`` and ``value_heads``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

__all__ = ["CHUNK", "EPS", "chunked", "chunked_from", "counted", "gated_delta_rule", "without_autocast"]

#: Added to the sum of squares of a query or key.
EPS = 1e-6
_FLOATS = ("float64", "float32", "bfloat16", "float16")
#: Positions of a chunk. Work within a chunk grows with its length, and steps from chunk to chunk with their number.
CHUNK = 64


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Reference: one position after another, in float32 or wider.

    Value head n reads the query and key head ``n // (N / K)``. Queries and keys are divided by their length.

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
    starts = _starts(documents, decay)
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

    Only the document that continues from the last chunk reads its state S, and only the last document hands a state on.

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
    """Gated delta rule in chunks, see :func:`chunked`, from a given state and with the last state as a second result.

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


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Context without autocast on the device of a tensor; autocast would round the factors of products."""
    # There is no autocast on meta.
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def supports(signature: OpSignature) -> Decision:
    """Accept floating-point dtypes on CPU and CUDA; the reference makes a step for each position."""
    if signature.dtype not in _FLOATS:
        return Decision(accept=False, reason=f"dtype {signature.dtype} is not one of {', '.join(_FLOATS)}")
    if signature.device not in ("cpu", "cuda"):
        return Decision(accept=False, reason=f"triangular systems are not solved on {signature.device}")
    return Decision(accept=True, reason=f"products within chunks of {CHUNK} positions", priority=10)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``chunked``; its function is the same for every signature."""
    return chunked


def counted(documents: Tensor) -> Tensor:
    """Number documents [B, S] from 1 in order, so that positions with equal numbers are adjacent; the same shape."""
    starts = _starts(documents, documents)
    assert starts is not None
    return starts.cumsum(1)


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
    # Padding at the end changes nothing before it: no decay, no strength.
    padding = -length % chunk
    parts = (query, key, value, beta, decay.to(value.dtype))
    q, k, v, b, g = (_in_chunks(part, padding, chunk) for part in parts)
    g = g.clamp(min=math.log(torch.finfo(g.dtype).tiny))  # already a factor of 0; sums stay finite and precise
    total = g.cumsum(-1)  # [B, N, chunks, C]
    same, reads, hands_on = _reach(documents, padding, chunk, samples, total)
    # Exponents of hidden pairs may overflow, so they are masked first.
    gamma = (total[..., :, None] - total[..., None, :]).masked_fill(~same, -torch.inf).exp()
    read = (total.exp() * reads)[..., None]  # decay from the state of the last chunk
    system = b[..., None] * gamma * (k @ k.mT)
    right = b[..., None] * torch.cat([v, k * read], dim=-1)
    # The solver reads only the entries below the diagonal, and takes the diagonal as ones.
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    changes, corrections = solved.split([width, solved.shape[-1] - width], dim=-1)
    scores, queries = gamma * (q @ k.mT), q * read
    last = total[..., -1:]
    keys = k * ((last - total).exp() * hands_on)[..., None]
    keep = (last.exp() * reads[..., -1:])[..., None]
    state = v.new_zeros(samples, heads, k.shape[-1], width) if state is None else state
    # Only states go from chunk to chunk, each an affine function of the last one; the outputs follow in one product.
    factors = keep * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - keys.mT @ corrections
    states = _affine_scan(factors, keys.mT @ changes, state)
    before = states[:, :, :-1]
    out = queries @ before + scores @ (changes - corrections @ before)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1]


# Ops of their own, because a compiler would unroll the loops over all chunks of a sample.
@torch.library.custom_op("d9d_nn::affine_scan", mutates_args=())
def _affine_scan(factors: Tensor, added: Tensor, begun: Tensor) -> Tensor:
    """States ``S[i + 1] = factors[i] S[i] + added[i]``, with ``S[0] = begun``.

    Shapes: factors [B, N, chunks, D_k, D_k], added [B, N, chunks, D_k, D_v], begun [B, N, D_k, D_v]; the result is
    [B, N, chunks + 1, D_k, D_v].
    """
    states = [begun]
    for factor, more in zip(factors.unbind(2), added.unbind(2), strict=True):
        states.append(factor @ states[-1] + more)
    return torch.stack(states, dim=2)


@torch.library.custom_op("d9d_nn::affine_scan_gradients", mutates_args=())
def _affine_scan_gradients(grad: Tensor, factors: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the factors, of the added matrices and of the first state, from the gradient of all states."""
    total, found = grad[:, :, -1], []
    for chunk in reversed(range(factors.shape[2])):
        found.append(total)
        total = grad[:, :, chunk] + factors[:, :, chunk].mT @ total
    of_added = torch.stack(found[::-1], dim=2)
    return of_added @ states[:, :, :-1].mT, of_added, total


@_affine_scan.register_fake
def _fake_scan(_factors: Tensor, added: Tensor, _begun: Tensor) -> Tensor:
    samples, heads, chunks, *state = added.shape
    return added.new_empty(samples, heads, chunks + 1, *state)


@_affine_scan_gradients.register_fake
def _fake_gradients(grad: Tensor, factors: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(factors), states.new_empty(states[:, :, 1:].shape), grad.new_empty(grad[:, :, 0].shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors, states = ctx.saved_tensors
    gradients: tuple[Tensor, Tensor, Tensor] = _affine_scan_gradients(grad, factors, states)
    return gradients


_affine_scan.register_autograd(_differentiate, setup_context=_keep)


def _prepared(query: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised and scaled queries, normalised keys, both for each value head, values and beta; float32 or wider."""
    wide = torch.promote_types(value.dtype, torch.float32)
    shared = value.shape[2] // key.shape[2]

    def normalised(x: Tensor) -> Tensor:
        x = x.to(wide)
        return (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()).repeat_interleave(shared, dim=2)

    return normalised(query) * key.shape[-1] ** -0.5, normalised(key), value.to(wide), beta.to(wide)


def _starts(documents: Tensor | None, decay: Tensor) -> Tensor | None:
    """Whether a position is the first one of its document, bool [B, S]."""
    if documents is None:
        return None
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1).to(decay.device)


def _in_chunks(x: Tensor, padding: int, chunk: int) -> Tensor:
    """Rearrange [B, S, N, ...] to [B, N, chunks, C, ...], with zeros after the last position."""
    x = torch.nn.functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, padding))
    return x.view(x.shape[0], -1, chunk, *x.shape[2:]).movedim(3, 1)


def _reach(
    documents: Tensor | None, padding: int, chunk: int, samples: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Reach of positions: within a chunk, from the last chunk and to the next one; each with one dim for heads.

    Returns:
        Whether position t sees position s <= t, bool [B or 1, 1, chunks or 1, C, C]; 1 where a position continues the
        document of the last chunk, and 1 where it belongs to the chunk's last document, [B or 1, 1, chunks or 1, C].
    """
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=like.device).tril_()
    if documents is None:
        one = like.new_ones(1, 1, 1, chunk)
        return earlier.view(1, 1, 1, chunk, chunk), one, one
    # A document has one number in a sample only if its tokens are adjacent, so borders are counted instead.
    numbers = counted(documents.to(like.device))
    places = torch.cat([numbers, numbers[:, -1:].expand(-1, padding)], dim=1).view(samples, 1, -1, chunk)
    # The first document continues the state before the first chunk.
    before = torch.nn.functional.pad(places[..., -1], (1, 0), value=1)[..., :-1, None]
    same = earlier & (places[..., :, None] == places[..., None, :])
    return same, (places == before).to(like.dtype), (places == places[..., -1:]).to(like.dtype)
