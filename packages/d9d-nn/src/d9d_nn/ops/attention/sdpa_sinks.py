"""Backend ``sdpa`` of ``sink_attention``: PyTorch's scaled dot product attention, with the sinks as a further key.

Shapes: B samples, S positions, Q queries, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from d9d_core.attention import Documents, MaskKind
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.nn import functional

from d9d_nn.ops.attention import sdpa
from d9d_nn.ops.attention.reference import visible


def supports(signature: OpSignature) -> Decision:
    """Accept the signatures that SDPA accepts.

    Chosen automatically only on other devices than CUDA, if ranks hold the queries of some positions: the reference
    cannot compute these queries alone.
    """
    decision = sdpa.supports(signature)
    if not decision.accept:
        return decision
    if signature.device != "cuda" and signature.static.get("own_queries"):
        return Decision(
            accept=True, reason="attends from queries of some positions, with scores in memory", priority=10
        )
    reason = "scores and a mask are in memory, as in the reference; used only if the job names it"
    return Decision(accept=True, reason=reason, priority=0)


def build(signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend function for the window and the data of a signature."""
    mask = signature.static.get("mask", "causal")
    return SinkSdpa(signature.static.get("window"), of_one=sdpa.of_one(signature), mask=mask)


class SinkSdpa:
    """SDPA backend of attention with sinks: a key of zeros, whose scores are the sinks and whose value is zero.

    Args:
        window: number of positions that a query sees, including its own; ``None`` for all.
        of_one: whether to ignore documents, see :func:`d9d_nn.ops.attention.sdpa.of_one`.
        mask: kind of the mask.

    Attributes:
        mask_kinds: the kind that the function was built for, see :mod:`d9d_core.attention`.
    """

    def __init__(self, window: int | None, *, of_one: bool = False, mask: MaskKind = "causal") -> None:
        self._window, self._of_one, self._kind = window, of_one, mask
        self.mask_kinds = (mask,)

    def prepare(self, documents: Documents, length: int, device: torch.device) -> Tensor:
        """Make the mask of all queries: bool [B, 1, S, S] with documents, else [S, S]."""
        return self._mask(documents, length, device, None)

    def prepare_queries(
        self, documents: Documents, queries: Sequence[range], length: int, device: torch.device
    ) -> Tensor:
        """Make the mask of queries at some positions (contiguous ranges): [B, 1, Q, S] with documents, else [Q, S]."""
        places = torch.cat([torch.arange(run.start, run.stop, device=device) for run in queries])
        return self._mask(documents, length, device, places)

    def _mask(self, documents: Documents, length: int, device: torch.device, places: Tensor | None) -> Tensor:
        if self._of_one or documents is None:
            return visible(length, None, device, self._window, places, mask=self._kind)
        return visible(length, documents, device, self._window, places, mask=self._kind)[:, None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`; ``mask`` is from a method above."""
        heads, groups = query.shape[2], query.shape[2] // key.shape[2]
        scores = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -math.inf)
        scores = scores.expand(*scores.shape[:-3], heads, *mask.shape[-2:])  # [B, N, Q, S] or [N, Q, S]
        column = sinks.to(query.dtype).view(heads, 1, 1).expand(*scores.shape[:-1], 1)
        key, value = (functional.pad(of, (0, 0, 0, 0, 0, 1)).transpose(1, 2) for of in (key, value))
        if groups > 1:  # torch's kernels accept grouped heads together with a mask on a CPU only
            key, value = (of.repeat_interleave(groups, dim=1) for of in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=torch.cat([scores, column], dim=-1)
        )
        return mixed.transpose(1, 2)
