"""Backends of ``attention`` by FlashAttention 2, 3 and 4.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head, T = B * S tokens, M largest
number of documents.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_flash_attention.starts import document_starts


class Attend(Protocol):
    """Interface of a FlashAttention library."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor | None,
        length: int,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: [B, S, N, D], or with ``starts`` [T, N, D].
            key: [B, S, K, D], or with ``starts`` [T, K, D].
            value: same shape as ``key``.
            starts: int32 [M + 1], see :func:`d9d_flash_attention.starts.document_starts`; ``None`` if each sample is
                one document.
            length: S.
            window: number of positions, its own included, that a query attends to backward, and forward too if not
                ``causal``; ``None`` for all.
            causal: whether a query attends to its own and earlier positions only.

        Returns:
            Same shape as ``query``.
        """
        ...


def build_2(signature: OpSignature) -> FlashAttention:
    """Build the backend by FlashAttention 2 (``flash_attn``), for the signature's window and documents."""
    return _build(signature, ByFunctions("flash_attn"))


def build_3(signature: OpSignature) -> FlashAttention:
    """Build the backend by FlashAttention 3 (``flash_attn_interface``), for the signature's window and documents."""
    return _build(signature, ByFunctions("flash_attn_interface"))


def build_4(signature: OpSignature) -> FlashAttention:
    """Build the backend by FlashAttention 4 (``flash_attn.cute``), for the signature's window and documents."""
    from d9d_flash_attention.cute import attend, check_library

    check_library()
    return _build(signature, attend)


def _build(signature: OpSignature, attend: Attend) -> FlashAttention:
    causal = signature.static.get("causal", True)
    of_one = signature.documents is False and causal
    return FlashAttention(attend, signature.static.get("window"), of_one=of_one, causal=causal)


class FlashAttention:
    """Attention by one of the FlashAttention libraries.

    Args:
        attend: the library's attention.
        window: number of positions that a query attends to, see :class:`Attend`; ``None`` for all.
        of_one: whether to ignore document indices, because each sample is one document, and causal attention never
            reaches the padding, which comes last.
        causal: whether a query attends to its own and earlier positions only.

    Attributes:
        mask_kinds: the kind of mask that the function computes, see :mod:`d9d_core.attention`.
    """

    def __init__(self, attend: Attend, window: int | None, *, of_one: bool = False, causal: bool = True) -> None:
        self._attend = attend
        self._causal = causal
        self.mask_kinds = ("causal" if causal else "bidirectional",)
        self._window = window
        self._of_one = of_one

    def prepare(self, documents: Tensor | None, length: int, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """Compute the positions where documents start, int32 [M + 1]; ``None`` if each sample is one document."""
        return None if documents is None or self._of_one else document_starts(documents)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`.

        Args:
            query: [B, S, N, D].
            key: [B, S, K, D].
            value: [B, S, K, D].
            starts: from :meth:`prepare`.

        Returns:
            [B, S, N, D].
        """
        query, key, value = _as_autocast(query, key, value)
        length = query.shape[1]
        window = self._window if self._window is None or self._window < length else None
        if starts is None:
            return self._attend(query, key, value, None, length, window, self._causal)
        flat = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        return self._attend(*flat, starts, length, window, self._causal).view(query.shape)


class ByFunctions:
    """FlashAttention 2 or 3: one function for samples of equal length, one for documents of any length.

    Args:
        module: name of the library's module with ``flash_attn_func`` and ``flash_attn_varlen_func``.
    """

    def __init__(self, module: str) -> None:
        library = importlib.import_module(module)
        self._samples: Callable[..., Any] = library.flash_attn_func
        self._documents: Callable[..., Any] = library.flash_attn_varlen_func

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor | None,
        length: int,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        """Compute attention, see :class:`Attend`."""
        # Numbers of positions to the left and right of the query's own; -1 for all.
        sides = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
        options: dict[str, Any] = {"causal": causal, "window_size": sides}
        if starts is None:
            out = self._samples(query, key, value, **options)
        else:
            out = self._documents(query, key, value, starts, starts, length, length, **options)
        # Older releases of FlashAttention 3 also return the log-sum-exp.
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast casts inputs of torch's own attention; autocast ignores functions of other libraries."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
