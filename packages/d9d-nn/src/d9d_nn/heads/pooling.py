"""Pooling of positions to samples or rows. Shapes: B samples, S positions, H features, at most N rows per sample."""

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


def pool(
    hidden: Tensor, lengths: Tensor | None, pooling: Pooling, ends: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Pool positions to one vector for each right-padded sample, or for each row of a packed sample.

    Padding does not count.

    Args:
        hidden: [B, S, H].
        lengths: int64 [B], tokens of each sample; ``None`` if there is no padding. A sample without tokens is
            represented by its first position (``last``) or zeros (means).
        pooling: ``last`` or ``first`` position, ``mean`` of all, or mean of the ``masked`` ones; means are summed in
            float32 or wider.
        ends: int64 [B, N], where each row of a packed sample ends and the next row begins, 0 after the last row.
        mask: bool or integers [B, S], not zero at the positions that ``masked`` averages.

    Returns:
        [B, H] in the dtype of ``hidden``; with ``ends`` [B, N, H], undefined after the last row.

    Raises:
        ValueError: the number of lengths is not the number of samples, or ``masked`` pooling got no mask [B, S].
    """
    samples, positions, features = hidden.shape
    if lengths is not None and lengths.shape != (samples,):  # other shapes would broadcast and give wrong means
        raise ValueError(f"lengths has the shape {tuple(lengths.shape)}; give ({samples},), one length for each sample")
    if pooling == "masked" and (mask is None or mask.shape != (samples, positions)):
        found = "none" if mask is None else f"one of the shape {tuple(mask.shape)}"
        raise ValueError(
            f"a head with pooling: masked needs pooling_mask [{samples}, {positions}] in the microbatch, and got "
            f"{found}; give it in the dataset, or choose another pooling"
        )
    counted = mask.bool() if pooling == "masked" and mask is not None else None
    if ends is not None:
        return _pool_rows(hidden, ends, pooling, counted)
    if pooling == "first":
        return hidden[:, 0]
    if pooling == "last":
        if lengths is None:
            return hidden[:, -1]
        index = (lengths - 1).clamp(min=0).view(samples, 1, 1)
        return hidden.gather(1, index.expand(samples, 1, features)).squeeze(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if lengths is None and counted is None:
        return hidden.mean(dim=1, dtype=wide).to(hidden.dtype)
    if lengths is not None:
        inside = torch.arange(positions, device=hidden.device) < lengths.unsqueeze(1)
        counted = inside if counted is None else counted & inside
    assert counted is not None
    total = torch.where(counted.unsqueeze(-1), hidden, 0).sum(dim=1, dtype=wide)
    return (total / counted.sum(dim=1).clamp(min=1).unsqueeze(1)).to(hidden.dtype)


def _pool_rows(hidden: Tensor, ends: Tensor, pooling: Pooling, counted: Tensor | None) -> Tensor:
    """Pool each row of packed samples [B, S, H] to [B, N, H]; ``counted`` bool [B, S] for masked pooling."""
    if pooling == "first":
        index = functional.pad(ends[:, :-1], (1, 0)).clamp(max=hidden.shape[1] - 1).unsqueeze(-1)
        return hidden.gather(1, index.expand(-1, -1, hidden.shape[2]))
    if pooling == "last":
        index = (ends - 1).clamp(min=0).unsqueeze(-1)
        return hidden.gather(1, index.expand(-1, -1, hidden.shape[2]))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    begins = functional.pad(ends[:, :-1], (1, 0))
    places = torch.arange(hidden.shape[1], device=hidden.device)
    inside = (places >= begins.unsqueeze(-1)) & (places < ends.unsqueeze(-1))
    if counted is not None:
        inside = inside & counted.unsqueeze(1)
    # A matrix product with ones and zeros sums positions in a fixed order, without a copy of the states for each row.
    total = inside.to(wide) @ hidden.to(wide)
    return (total / inside.sum(dim=-1).clamp(min=1).unsqueeze(-1)).to(hidden.dtype)
