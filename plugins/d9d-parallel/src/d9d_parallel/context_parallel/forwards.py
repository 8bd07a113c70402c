"""Forwards of attention cores for a rank's own positions.

An instance of each class replaces ``core.forward``. They are objects, not closures, so that a deep copy of a core has
its own copy of them, with its own masks.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare
from d9d_engine.distributed.positions import ZigzagPositions
from torch import Tensor, nn

from d9d_parallel.context_parallel.share import exchange
from d9d_parallel.ranks import Ranks


class GatheredKeys:
    """Context-parallel forward with a rank's own queries, and gathered keys and values (method ``all_gather``).

    Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2: grouped-query attention has few keys and values, and
    any kind of mask works as in one process.

    Args:
        core: attention core that accepts queries of some positions together with keys of all positions.
        share: positions of this rank.
    """

    def __init__(self, core: nn.Module, share: ContextShare) -> None:
        self.forward: Callable[..., Tensor] = core.forward
        self.share = share

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Any = None, *sinks: Tensor) -> Tensor:
        """Compute attention [B, S / R, N, D] of queries [B, S / R, N, D]; keys and values are [B, S / R, K, D]."""
        both = self.share.gather(torch.cat([key, value], dim=2))
        key, value = both.chunk(2, dim=2)
        return self.forward(query, key, value, documents, *sinks)


class ExchangedHeads:
    """Context-parallel forward (method ``ulysses``): all-to-alls give each rank all positions of some heads.

    Jacobs et al. 2023, "DeepSpeed Ulysses", section 3. If there are fewer key/value heads than ranks, each head is sent
    to several ranks, and its gradients from these ranks are summed.

    Args:
        core: any attention core.
        ranks: ranks that exchange positions for heads.
    """

    def __init__(self, core: nn.Module, ranks: Ranks) -> None:
        self.forward: Callable[..., Tensor] = core.forward
        self.ranks = ranks

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Any = None, *sinks: Tensor) -> Tensor:
        """Compute attention [B, S / R, N, D] of queries [B, S / R, N, D]; keys and values are [B, S / R, K, D].

        Sinks [N] of all heads are divided like the heads.

        Raises:
            BuildError: the heads can be neither divided over the ranks nor repeated.
        """
        size = self.ranks.size
        check_heads(query.shape[2], key.shape[2], size)
        if key.shape[2] < size:  # rank r gets head r * K // R
            key, value = (heads.repeat_interleave(size // key.shape[2], dim=2) for heads in (key, value))
        parts = [torch.stack(heads.chunk(size, dim=2)) for heads in (query, key, value)]  # [R, B, S / R, N / R, D]
        counts = [part.shape[3] for part in parts]
        whole = ZigzagPositions.joined(exchange(torch.cat(parts, dim=3), self.ranks))
        own = (one.chunk(size)[self.ranks.rank] for one in sinks)
        mixed = self.forward(*torch.split(whole, counts, dim=2), documents, *own)
        back = exchange(ZigzagPositions.parted(mixed, size), self.ranks)
        return back.movedim(0, 2).flatten(2, 3)


def check_heads(query_heads: int, key_value_heads: int, ranks: int) -> None:
    """Raise an error if heads cannot be divided over ranks.

    Raises:
        BuildError: the number of ranks does not divide the number of query heads, or it neither divides nor is a
            multiple of the number of key/value heads.
    """
    problem = ""
    if query_heads % ranks:
        problem = f"does not divide the {query_heads} query heads"
    elif key_value_heads % ranks and ranks % key_value_heads:
        problem = f"neither divides the {key_value_heads} key/value heads nor is a multiple of them"
    if problem:
        raise BuildError(
            f"strategy 'context_parallel': methods ulysses and hybrid divide heads, here over {ranks} ranks of cp, "
            f"which {problem} of a rank; choose another number of ranks, or method all_gather, which does not split "
            "heads"
        )
