"""Stand-ins for the libraries on a CPU: the functions that are called and their demands on arguments, and no more.

Numbers are real ones: each document on its own, in float32. Shapes: T tokens, N query heads, K key/value heads, D
features of a head, M documents.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

#: Numbers of positions that a query sees to its left and right; ``None`` for all.
Sides = tuple[int | None, int | None]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Mapping[int, Any]:
    """All three libraries are there, whatever is installed."""
    found = {2: Library2(), 3: Library3(), 4: Library4()}
    at = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
    for name in (*at.values(), "flash_attn.flash_attn_interface", "flash_attn.cute"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for number, library in found.items():
        for name, function in inspect.getmembers(library, inspect.ismethod):
            setattr(sys.modules[at[number]], name, function)
    return found


def scores(q: Tensor, k: Tensor, sides: Sides) -> Tensor:
    """Of one document, float32 [K, N / K, T, T]; -inf where a query does not see a key."""
    q, k = q.float().unflatten(1, (k.shape[1], -1)), k.float()
    behind = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left, right = (len(q) if side is None else side for side in sides)
    seen = (behind <= left) & (-behind <= right)
    products = torch.einsum("skgd,tkd->kgst", q, k) / math.sqrt(q.shape[-1])
    return products.masked_fill(~seen, -math.inf)


def document(q: Tensor, k: Tensor, v: Tensor, sides: Sides) -> tuple[Tensor, Tensor]:
    """Attention inside one document: [T, N, D] in float32, and the logarithms of sums [N, T]."""
    found = scores(q, k, sides)
    out = torch.einsum("kgst,tkd->skgd", found.softmax(-1), v.float())
    return out.flatten(1, 2), found.logsumexp(-1).flatten(0, 1)


def document_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, sides: Sides
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one document in float32, from the tensors saved by the forward."""
    q, out, grad = (t.float().unflatten(1, (k.shape[1], -1)) for t in (q, out, grad))
    k, v = k.float(), v.float()
    probabilities = (scores(q.flatten(1, 2), k, sides) - sums.unflatten(0, q.shape[1:3])[..., None]).exp()
    of_probabilities = torch.einsum("skgd,tkd->kgst", grad, v)
    inner = (out * grad).sum(-1).permute(1, 2, 0)[..., None]
    of_scores = probabilities * (of_probabilities - inner) / math.sqrt(q.shape[-1])
    return (
        torch.einsum("kgst,tkd->skgd", of_scores, k).flatten(1, 2),
        torch.einsum("kgst,skgd->tkd", of_scores, q),
        torch.einsum("kgst,skgd->tkd", probabilities, grad),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, sides: Sides) -> tuple[Tensor, Tensor]:
    """Outputs and logarithms of sums, as a library shapes them."""
    check(q, k, v, starts)
    parts = zip(*(divided(t, starts) for t in (q, k, v)), strict=True)
    outs, sums = zip(*(document(*part, sides) for part in parts), strict=True)
    if starts is None:
        return torch.stack(outs).to(q.dtype), torch.stack(sums)
    return torch.cat(outs).to(q.dtype), torch.cat(sums, dim=1)


def divided(tensor: Tensor, starts: Tensor | None, dim: int = 0) -> Iterable[Tensor]:
    """Documents, or samples."""
    return tensor if starts is None else tensor.split(starts.diff().tolist(), dim)


def check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert k.shape == v.shape
    assert q.shape[-2] % k.shape[-2] == 0
    if starts is None:
        assert q.dim() == 4
        assert q.shape[:2] == k.shape[:2]
        return
    assert q.dim() == 3
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert starts[0] == 0
    assert starts[-1] == len(q) == len(k)
    assert (starts.diff() >= 0).all()


class Library2:
    """``flash_attn`` of FlashAttention 2."""

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
    ) -> Any:
        return self.returned(*attend(q, k, v, None, sides_of(causal, *window_size)))

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:
        assert cu_seqlens_q is cu_seqlens_k
        assert cu_seqlens_q.diff().max() <= max_seqlen_q == max_seqlen_k
        return self.returned(*attend(q, k, v, cu_seqlens_q, sides_of(causal, *window_size)))

    def returned(self, out: Tensor, sums: Tensor) -> Any:
        return out


class Library3(Library2):
    """``flash_attn_interface`` of FlashAttention 3, as older releases return it."""

    def returned(self, out: Tensor, sums: Tensor) -> Any:
        return out, sums


def sides_of(causal: bool, to_the_left: int, to_the_right: int) -> Sides:
    """Positions seen to the left and right; -1 is all positions, and causal attention sees none on the right."""
    assert (to_the_left == -1) == (to_the_right == -1)
    assert to_the_right in ((-1, 0) if causal else (-1, to_the_left))
    left, right = (None if side == -1 else side for side in (to_the_left, to_the_right))
    return left, 0 if causal else right


class Library4:
    """``flash_attn.cute.interface`` of FlashAttention 4."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        causal: bool = False,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        self.calls.append("forward")
        self.check(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        out, sums = attend(q, k, v, cu_seqlens_q, (window_size_left, 0 if causal else window_size_right))
        return out, sums if return_lse or q.requires_grad else None, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        causal: bool = False,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        self.check(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        assert not torch.is_grad_enabled()
        assert dout.shape == q.shape == out.shape
        assert dout.dtype == q.dtype
        check(q, k, v, cu_seqlens_q)
        rows = [divided(t, cu_seqlens_q) for t in (q, k, v, out, dout)]
        parts = zip(*rows, divided(lse, cu_seqlens_q, dim=-1), strict=True)
        sides = window_size_left, 0 if causal else window_size_right
        by_document = [document_gradients(*part, sides) for part in parts]
        join = torch.stack if cu_seqlens_q is None else torch.cat
        found = [join(grads) for grads in zip(*by_document, strict=True)]
        for into, gradient, tensor in zip((dq, dk, dv), found, (q, k, v), strict=True):
            assert into.shape == tensor.shape
            assert into.dtype == tensor.dtype
            assert into.is_contiguous()
            into.copy_(gradient)
        return dq, dk, dv

    def check(
        self,
        starts: Tensor | None,
        starts_k: Tensor | None,
        most: int | None,
        most_k: int | None,
        causal: bool,
        to_the_left: int | None,
        to_the_right: int | None,
    ) -> None:
        assert starts is starts_k
        assert most == most_k
        assert to_the_right == (0 if causal and to_the_left is not None else to_the_left)
        if starts is not None:
            assert starts.diff().max() <= most
