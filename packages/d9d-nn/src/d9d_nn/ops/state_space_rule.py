"""Op ``state_space_rule``: a state per head that decays at a rate of its own and adds each token's input.

Dao and Gu 2024, "Transformers are SSMs", section 2. The state of a head is a matrix S of D_s x D numbers, zero at the
start of each document; with the input x, the step dt, and the vectors B and C of a token, and the rate A of the head:

    S <- exp(dt A) S + B (dt x)^T
    output = C^T S

Shapes: B samples, S positions, N heads, G groups (N is a multiple of G), R = N / G heads of a group, D features of a
head, D_s of the state, T positions of a chunk, Z chunks. The slot's static facts are ``heads``, ``groups``,
``head_dim`` and ``state_dim``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor

from d9d_nn.ops.chunks import CHUNK, FLOATS, affine_scan, decays_between, in_chunks, reach, starts_of, without_autocast

__all__ = ["chunked", "chunked_with_state", "state_space_rule"]


def state_space_rule(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, documents: Tensor | None = None) -> Tensor:
    """Reference of the state-space rule: computes one position after another, in float32 or wider.

    Head n reads the vectors of group ``n // R``.

    Args:
        x: [B, S, N, D].
        dt: float32 [B, S, N], step sizes; not negative.
        A: float32 [N], finite rates; not positive.
        B: [B, S, G, D_s].
        C: [B, S, G, D_s].
        documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.

    Returns:
        [B, S, N, D] in the dtype of ``x``.
    """
    wide, starts = torch.promote_types(x.dtype, torch.float32), starts_of(documents, x)
    inputs, keep = x.to(wide) * dt.to(wide)[..., None], (dt * A).to(wide).exp()
    into, out_of = (part.to(wide).repeat_interleave(x.shape[2] // part.shape[2], dim=2) for part in (B, C))
    if starts is not None:
        keep = keep.masked_fill(starts[..., None], 0)
    state, outputs = inputs.new_zeros(x.shape[0], x.shape[2], B.shape[-1], x.shape[-1]), []
    with without_autocast(x):
        for position in range(x.shape[1]):
            added = torch.einsum("bns,bnd->bnsd", into[:, position], inputs[:, position])
            state = state * keep[:, position, :, None, None] + added
            outputs.append(torch.einsum("bns,bnsd->bnd", out_of[:, position], state))
    return torch.stack(outputs, dim=1).to(x.dtype)


def chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, documents: Tensor | None = None, *, chunk: int = CHUNK
) -> Tensor:
    """State-space rule, see :func:`state_space_rule`, by products within chunks of T = ``chunk`` positions (section 6).

    Chunks are exact at document borders.
    """
    return chunked_with_state(x, dt, A, B, C, documents, chunk=chunk)[0].to(x.dtype)


def chunked_with_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, documents: Tensor | None = None, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Outputs [B, S, N, D] of :func:`chunked` and the last state [B, N, D_s, D], both float32 or wider."""
    wide, (samples, length, heads, _), groups = torch.promote_types(x.dtype, torch.float32), x.shape, B.shape[2]
    chunk = min(chunk, length)
    padding = -length % chunk  # after the last position; without decay and input, it does not change the state
    by_group = (x.to(wide) * dt.to(wide)[..., None], (dt * A).to(wide))
    inputs, g = (in_chunks(torch.unflatten(part, 2, (groups, -1)), padding, chunk) for part in by_group)
    b, c = (in_chunks(part.to(wide), padding, chunk) for part in (B, C))  # [B, G, Z, T, D_s]
    g = g.movedim(-1, 2)  # [B, G, R, Z, T]
    same, reads = (part.unsqueeze(2) for part in reach(documents, padding, chunk, samples, g))
    gamma, read = decays_between(g, same), g.cumsum(-1).exp() * reads  # [B, G, R, Z, T, T], [B, G, R, Z, T]
    kept = inputs * gamma[..., -1, :].movedim(2, -1)[..., None]  # [B, G, Z, T, R, D]
    with without_autocast(x):
        added = torch.einsum("bgzts,bgztrd->bgrzsd", b, kept).flatten(1, 2)  # [B, N, Z, D_s, D]
        # All D_s x D numbers of a state decay by one factor, so the scan takes the state as one row.
        factors = read[..., -1:].flatten(1, 2)[..., None]
        rows = added.flatten(3).unsqueeze(3)
        states = affine_scan(factors, rows, torch.zeros_like(rows[:, :, 0])).view(samples, heads, -1, *added.shape[3:])
        before = torch.unflatten(states[:, :, :-1], 1, (groups, -1))
        earlier = torch.einsum("bgzts,bgrzsd->bgztrd", c, before) * read.movedim(2, -1)[..., None]
        scores = gamma * (c @ b.mT).unsqueeze(2)
        out = earlier + torch.einsum("bgrzto,bgzord->bgztrd", scores, inputs)
    return out.movedim(1, 3).flatten(1, 2)[:, :length].flatten(2, 3), states[:, :, -1]


def supports(signature: OpSignature) -> Decision:
    """Accept floating-point dtypes; preferred to the reference, which loops over the positions."""
    if signature.dtype not in FLOATS:
        return Decision(accept=False, reason=f"dtype {signature.dtype} is not one of {', '.join(FLOATS)}")
    return Decision(accept=True, reason=f"products within chunks of {CHUNK} positions", priority=10)


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``chunked``; its function is the same for every signature."""
    return chunked
