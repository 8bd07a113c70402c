"""Backend ``sdpa`` of ``attention``: PyTorch's fused scaled dot product attention.

Shapes: B samples, S positions, N query heads, K key/value heads (N = K * G), D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from d9d_core.attention import MASK_KINDS, Documents, MaskKind, mask_kind, mask_refusal
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.nn import functional

from d9d_nn.ops.attention import partial
from d9d_nn.ops.attention.queries import QueryRectangles
from d9d_nn.ops.attention.reference import visible

#: Priority of this backend, above flex's, if ranks of ``cp`` hold the queries of some positions and no document or
#: window hides keys: then sdpa needs no mask.
_QUERIES_PRIORITY = 20
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def supports(signature: OpSignature) -> Decision:
    """Accept SDPA for all kinds of masks in any floating-point dtype, on any device."""
    if signature.dtype not in _FLOATS:
        return Decision(
            accept=False, reason=f"needs one of {', '.join(sorted(_FLOATS))}, the model is {signature.dtype}"
        )
    if refusal := mask_refusal(signature.static, *MASK_KINDS):
        return Decision(accept=False, reason=refusal)
    kind = mask_kind(signature.static)
    if kind == "blocks":
        masks = "blocks need a mask of S x S per sample"
    elif signature.static.get("window") is not None:
        masks = "a window needs a mask of S x S" + (", per sample with documents" * (not of_one(signature)))
    elif signature.static.get("own_queries") and _in_rectangles(signature):
        reason = "fused, torch chooses the kernel; queries of some positions attend in rectangles, without a mask"
        return Decision(accept=True, reason=reason, priority=_QUERIES_PRIORITY)
    elif signature.static.get("own_queries"):
        masks = "queries of some positions need a mask" + (", per sample with documents" * (not of_one(signature)))
    elif of_one(signature):
        masks = "samples are one document each, so it needs no mask"
    elif signature.documents is False and kind == "bidirectional":
        masks = "padding needs a mask of S x S per sample, full samples no mask"
    else:
        masks = "documents need a mask of S x S per sample, other data no mask"
    return Decision(accept=True, reason=f"fused, torch chooses the kernel; {masks}", priority=10)


def of_one(signature: OpSignature) -> bool:
    """Whether a backend may ignore ``documents``, because each sample is one document.

    Tokens are before the padding, which a causal mask hides. Always false on other devices than CUDA, because only
    CUDA's fast kernels accept no mask, and for attention that is not causal, where only documents hide the padding.
    """
    causal = mask_kind(signature.static) == "causal"
    return signature.documents is False and signature.device == "cuda" and causal


def _in_rectangles(signature: OpSignature) -> bool:
    """Whether queries at some positions are computed in rectangles that need no mask.

    Always false on a CPU, whose kernels accept masks.
    """
    return of_one(signature) and signature.static.get("window") is None and partial.refusal(signature) is None


def build(signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend function for the device, window and data of a signature."""
    # On CUDA, the flash and cuDNN kernels accept grouped heads, in 16 bits and without a mask. Otherwise torch would
    # use the kernel that holds all scores, so heads are repeated. On CPU all kernels accept grouped heads.
    on_cuda = signature.device == "cuda"
    grouped = not on_cuda or signature.dtype in ("bfloat16", "float16")
    return Sdpa(
        signature.static.get("window"),
        grouped=grouped,
        grouped_with_mask=signature.device == "cpu",
        of_one=of_one(signature),
        in_rectangles=_in_rectangles(signature),
        mask=signature.static.get("mask", "causal"),
    )


class Sdpa:
    """SDPA backend of attention: torch's ``scaled_dot_product_attention``.

    Args:
        window: number of positions that a query sees, including its own; ``None`` for all.
        grouped: whether the kernels without a mask accept grouped heads; otherwise heads are repeated.
        grouped_with_mask: whether the kernels with a mask accept grouped heads.
        of_one: whether to ignore documents, see :func:`of_one`.
        in_rectangles: whether to compute queries of some positions in rectangles of the score matrix, without a mask.
        mask: kind of the mask.

    Attributes:
        mask_kinds: the kind that the function was built for, see :mod:`d9d_core.attention`.
    """

    def __init__(
        self,
        window: int | None,
        *,
        grouped_with_mask: bool,
        grouped: bool = True,
        of_one: bool = False,
        in_rectangles: bool = False,
        mask: MaskKind = "causal",
    ) -> None:
        self._window = window
        self._of_one = of_one
        self._in_rectangles = in_rectangles
        self._grouped = grouped
        self._grouped_with_mask = grouped_with_mask
        self._mask = mask
        self.mask_kinds = (mask,)

    def prepare(self, documents: Documents, length: int, device: torch.device) -> Tensor | None:
        """Make the mask: bool [B, 1, S, S] with documents or blocks, [S, S] with a window, ``None`` without these."""
        if documents is not None and not self._of_one:
            return visible(length, documents, device, self._window, mask=self._mask)[:, None]
        if self._window is not None and self._window < length:
            return visible(length, None, device, self._window, mask=self._mask)
        return None

    def prepare_queries(
        self, documents: Documents, queries: Sequence[range], length: int, device: torch.device
    ) -> Tensor | QueryRectangles | None:
        """Make the mask of queries at some positions (contiguous ranges): [B, 1, Q, S] with documents, else [Q, S].

        With ``in_rectangles`` and no documents, returns the rectangles instead, which need no mask. ``None`` if each
        query sees all keys.
        """
        if self._in_rectangles:
            return QueryRectangles(queries, length)
        places = torch.cat([torch.arange(run.start, run.stop, device=device) for run in queries])
        if documents is not None and not self._of_one:
            return visible(length, documents, device, self._window, places, mask=self._mask)[:, None]
        if self._mask == "bidirectional" and (self._window is None or self._window >= length):
            return None
        return visible(length, None, device, self._window, places, mask=self._mask)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | QueryRectangles | None = None
    ) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`; ``mask`` is from :meth:`prepare`."""
        if isinstance(mask, QueryRectangles):
            return mask.attend(query, key, value)
        groups = query.shape[2] // key.shape[2]
        grouped = groups > 1 and (self._grouped if mask is None else self._grouped_with_mask)
        if groups > 1 and not grouped:
            key, value = _repeat(key, groups), _repeat(value, groups)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and self._mask != "bidirectional",
            enable_gqa=grouped,
        )
        return mixed.transpose(1, 2)


def _repeat(heads: Tensor, groups: int) -> Tensor:
    """Repeat each head G times in succession, [B, S, K, D] -> [B, S, K * G, D]."""
    return heads.repeat_interleave(groups, dim=2)
