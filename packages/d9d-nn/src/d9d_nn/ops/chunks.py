"""Chunks of the positions of a sample, for rules with a state per head; used by the ops of recurrent layers.

Shapes: B samples, S positions, N heads, D_k x D_v numbers of a state, C positions of a chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: Dtypes that the chunked rules accept.
FLOATS = ("float64", "float32", "bfloat16", "float16")
#: Positions of a chunk. Longer chunks need more work per position, shorter ones more sequential steps.
CHUNK = 64


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Context without autocast on the device of a tensor; autocast would round the factors of products."""
    # torch has no autocast for the meta device.
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def counted(documents: Tensor) -> Tensor:
    """Number documents [B, S] from 1 in order, so that positions with equal numbers are adjacent; the same shape."""
    starts = starts_of(documents, documents)
    assert starts is not None
    return starts.cumsum(1)


def starts_of(documents: Tensor | None, decay: Tensor) -> Tensor | None:
    """Whether each position is the first one of its document, bool [B, S]; ``None`` without documents."""
    if documents is None:
        return None
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1).to(decay.device)


def in_chunks(x: Tensor, padding: int, chunk: int) -> Tensor:
    """Rearrange [B, S, N, ...] to [B, N, chunks, C, ...], with zeros after the last position."""
    x = torch.nn.functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, padding))
    return x.view(x.shape[0], -1, chunk, *x.shape[2:]).movedim(3, 1)


def reach(documents: Tensor | None, padding: int, chunk: int, samples: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Earlier positions that each position sees: within its chunk, and in the previous chunk.

    Returns:
        Whether position t of a chunk sees position s <= t, bool [B or 1, 1, chunks or 1, C, C]; and 1 where a position
        continues the document that ended the previous chunk, else 0, [B or 1, 1, chunks or 1, C]. Dim 1 is for heads.
    """
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=like.device).tril_()
    if documents is None:
        return earlier.view(1, 1, 1, chunk, chunk), like.new_ones(1, 1, 1, chunk)
    # Equal document numbers need not be adjacent; numbers counted from the borders are equal only within one document.
    numbers = counted(documents.to(like.device))
    places = torch.cat([numbers, numbers[:, -1:].expand(-1, padding)], dim=1).view(samples, 1, -1, chunk)
    # The first document continues the state before the first chunk.
    before = torch.nn.functional.pad(places[..., -1], (1, 0), value=1)[..., :-1, None]
    return earlier & (places[..., :, None] == places[..., None, :]), (places == before).to(like.dtype)


def decays_between(decay: Tensor, same: Tensor) -> Tensor:
    """Factors by which the input of position s shrinks until position t, ``exp(decay[s + 1] + ... + decay[t])``.

    Args:
        decay: logarithms of the factors of positions, [..., C].
        same: whether position t sees position s, bool, broadcastable to [..., C, C].

    Returns:
        [..., C (t), C (s)], 0 where t does not see s.
    """
    # Each pair (t, s) is summed separately: in a difference of cumulative sums, large decays of other documents would
    # cost precision.
    sums = decay[..., None].expand(*decay.shape, decay.shape[-1]).tril(-1).cumsum(-2)
    return sums.masked_fill(~same, -torch.inf).exp()


# The scan is a custom op, because a compiler would unroll its loop over all chunks of a sample.
@torch.library.custom_op("d9d_nn::affine_scan", mutates_args=())
def affine_scan(factors: Tensor, added: Tensor, begun: Tensor) -> Tensor:
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


@affine_scan.register_fake
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


affine_scan.register_autograd(_differentiate, setup_context=_keep)
