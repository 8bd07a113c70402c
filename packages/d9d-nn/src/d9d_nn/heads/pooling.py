"""Pooling of positions to samples or rows. Shapes: B samples, S positions, H features, N at most rows per sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, StepShape
from torch import Tensor
from torch.nn import functional

from d9d_nn.heads.config import Pooling


class PoolsContext:
    """Base of heads that pool whole samples; it gathers the positions that context parallelism splits over ``cp``.

    Attributes:
        features: H; ``None`` in a head that accepts any H.
    """

    features: int | None = None
    _context: ContextShare | None = None

    def see_context(self, share: ContextShare) -> None:
        """Accept hidden states of only this rank's positions from now on; each rank then gathers all positions."""
        self._context = share

    def context_collectives(self, step: StepShape) -> Iterator[ContextCall]:
        """Collectives of a forward and a backward, on hidden states [B, S, H]."""
        ranks = 1 if self._context is None else self._context.ranks
        size = None if self.features is None else step.bytes_of(ranks * self.features)
        yield ContextCall("all_gather", size, "hidden states")
        yield ContextCall("reduce_scatter", size, "gradients of hidden states", backward=True)

    def of_all_positions(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, H] of all ranks. Collective over ``cp``, forward and backward."""
        return hidden if self._context is None else self._context.gather(hidden)


def pool(hidden: Tensor, lengths: Tensor | None, pooling: Pooling, ends: Tensor | None = None) -> Tensor:
    """Pooling for heads: one vector for each right-padded sample, or for each row of a packed sample, without padding.

    Args:
        hidden: [B, S, H].
        lengths: int64 [B], tokens of each sample; ``None`` if there is no padding. A sample without tokens is
            represented by its first position (``last``) or zeros (``mean``).
        ends: int64 [B, N], where each row of a packed sample ends and the next row begins, 0 after the last row.
        pooling: ``last`` position, or ``mean`` of all, summed in float32 or wider.

    Returns:
        [B, H] in the dtype of ``hidden``; with ``ends`` [B, N, H], undefined after the last row.

    Raises:
        ValueError: the number of lengths is not the number of samples.
    """
    samples, positions, features = hidden.shape
    if lengths is not None and lengths.shape != (samples,):  # other shapes would broadcast and give wrong means
        raise ValueError(f"lengths has the shape {tuple(lengths.shape)}; give ({samples},), one length for each sample")
    if ends is not None:
        return _pool_rows(hidden, ends, pooling)
    if pooling == "last":
        if lengths is None:
            return hidden[:, -1]
        index = (lengths - 1).clamp(min=0).view(samples, 1, 1)
        return hidden.gather(1, index.expand(samples, 1, features)).squeeze(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if lengths is None:
        return hidden.mean(dim=1, dtype=wide).to(hidden.dtype)
    inside = torch.arange(positions, device=hidden.device) < lengths.unsqueeze(1)
    total = torch.where(inside.unsqueeze(-1), hidden, 0).sum(dim=1, dtype=wide)
    return (total / lengths.clamp(min=1).unsqueeze(1)).to(hidden.dtype)


def _pool_rows(hidden: Tensor, ends: Tensor, pooling: Pooling) -> Tensor:
    """Pool each row of packed samples [B, S, H] to [B, N, H]."""
    if pooling == "last":
        index = (ends - 1).clamp(min=0).unsqueeze(-1)
        return hidden.gather(1, index.expand(-1, -1, hidden.shape[2]))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    begins = functional.pad(ends[:, :-1], (1, 0))
    places = torch.arange(hidden.shape[1], device=hidden.device)
    inside = (places >= begins.unsqueeze(-1)) & (places < ends.unsqueeze(-1))
    # A product with ones and zeros sums in a fixed order, without a copy of the states for each row.
    total = inside.to(wide) @ hidden.to(wide)
    return (total / (ends - begins).clamp(min=1).unsqueeze(-1)).to(hidden.dtype)
