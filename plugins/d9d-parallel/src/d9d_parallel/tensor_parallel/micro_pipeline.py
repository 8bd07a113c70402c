"""Matrix products divided into one part per rank, so that one part is sent while another part is multiplied.

Parts are sent one by one, instead of all in one collective (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition", section 5.1): in each turn, an all-to-all, every rank sends to one other rank. A rank's
own part is not sent, and is computed meanwhile.

Shapes: B samples, S positions, R ranks, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from d9d_parallel.ranks import Ranks


def gather_multiply(rows: Tensor, weights: Sequence[Tensor], ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """Micro-pipeline: all-gather rows, and multiply each part as it arrives. Collective over the ranks.

    Args:
        rows: [B, S / R, I].
        weights: [O, I] each, in one dtype, to which rows are cast for the product; may be empty.
        ranks: ranks in the order of the rows.

    Returns:
        All rows [B, S, I], and ``rows @ weight.T`` [B, S, O] of each weight.
    """
    own, size = rows.contiguous(), ranks.size
    whole = _Places(own, size, own.shape[-1], own.dtype)
    outs = [_Places(own, size, weight.shape[0], weight.dtype) for weight in weights]
    sources = [(ranks.rank + turn) % size for turn in range(1, size)]
    coming = [
        _swap(own, whole.parts[source], ranks, to=(ranks.rank - turn) % size, source=source)
        for turn, source in enumerate(sources, start=1)
    ]
    whole.parts[ranks.rank].copy_(own)
    _multiply(own, weights, [out.parts[ranks.rank] for out in outs])
    for source, arrive in zip(sources, coming, strict=True):
        arrive()
        _multiply(whole.parts[source], weights, [out.parts[source] for out in outs])
    return whole.joined(), [out.joined() for out in outs]


def multiply_scatter(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    besides: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Micro-pipeline: multiply rows in parts, and send each part while the next is multiplied. Collective.

    Args:
        rows: [B, S, I] each; I may differ.
        weights: [O, I] each; the products with their rows are summed.
        ranks: ranks in the order of the parts.
        dtype: dtype of the sums over products and over ranks.
        besides: further summand [B, S, O] in ``dtype`` for the sum of products; ``None`` for none.

    Returns:
        Function that waits for the other ranks' parts and returns the sum over all ranks [B, S / R, O], added in the
        order of the ranks.
    """
    size, rank = ranks.size, ranks.rank
    parts = [_parted(one, size) for one in rows]
    added = None if besides is None else _parted(besides, size)
    like = parts[0] if added is None else added
    features = weights[0].shape[0] if added is None else added.shape[-1]
    partial = like.new_empty(*like.shape[:-1], features, dtype=dtype)
    received: list[Callable[[], None]] = []
    # A rank's own part is computed last, while the others are in transit.
    for turn in range(1, size + 1):
        to, source = (rank + turn) % size, (rank - turn) % size
        total = None if added is None else added[to].reshape(-1, features)
        for part, weight in zip(parts, weights, strict=True):
            total = _add_product(total, part[to].reshape(-1, weight.shape[1]), weight, dtype)
        assert total is not None  # there is at least one summand
        total = total.contiguous().view(partial.shape[1:])  # the gradient of a sum has strides of zero
        if to == rank:
            partial[rank].copy_(total)
        else:
            received.append(_swap(total, partial[source], ranks, to=to, source=source))

    def finish() -> Tensor:
        for arrive in received:
            arrive()
        out: Tensor = partial.sum(0, dtype=dtype)  # explicit, as autocast would change the dtype
        return out

    return finish


class _Places:
    """Memory for positions [B, S, F] that arrive part by part.

    Args:
        own: [B, S / R, ...], this rank's part.
        ranks: R.
        features: F.
        dtype: dtype of the memory.

    Attributes:
        parts: [R, B, S / R, F], each part contiguous.
    """

    def __init__(self, own: Tensor, ranks: int, features: int, dtype: torch.dtype) -> None:
        samples, positions = own.shape[:2]
        # With one sample, the parts are consecutive; with several, they are copied at the end.
        self._whole = own.new_empty(1, ranks * positions, features, dtype=dtype) if samples == 1 else None
        if self._whole is None:
            self.parts = own.new_empty(ranks, samples, positions, features, dtype=dtype)
        else:
            self.parts = self._whole.view(ranks, 1, positions, features)

    def joined(self) -> Tensor:
        """All positions [B, S, F]."""
        return self.parts.movedim(0, 1).flatten(1, 2) if self._whole is None else self._whole


def _parted(tensor: Tensor, ranks: int) -> Tensor:
    """View positions [B, S, F] as parts [R, B, S / R, F]."""
    return torch.unflatten(tensor, 1, (ranks, -1)).movedim(1, 0)


def _multiply(rows: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    for weight, out in zip(weights, outs, strict=True):
        flat = rows.reshape(-1, weight.shape[1]).to(weight.dtype)
        torch.mm(flat, weight.t(), out=out.view(-1, weight.shape[0]))


def _add_product(total: Tensor | None, rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows [tokens, I] by a weight, and add the product to a total [tokens, O] if one is given."""
    if total is not None and dtype == rows.dtype:
        return torch.addmm(total, rows, weight.t())
    product = rows.mm(weight.t()).to(dtype)
    return product if total is None else total + product


def _swap(sent: Tensor, place: Tensor, ranks: Ranks, *, to: int, source: int) -> Callable[[], None]:
    """Start to send a tensor to one rank and to receive one of the same shape; returns a function that waits for it.

    Collective over the ranks.
    """
    give, take = ([int(number == other) for number in range(ranks.size)] for other in (to, source))
    if torch.compiler.is_compiling():
        # Dynamo supports no asynchronous calls except these, which it generates itself for others; a test pins them.
        functional = torch.ops._c10d_functional  # noqa: SLF001
        coming = functional.all_to_all_single(sent.unsqueeze(0), take, give, ranks.name)

        def arrive_in_graph() -> None:
            place.copy_(functional.wait_tensor(coming)[0])

        return arrive_in_graph
    work = dist.all_to_all_single(place.unsqueeze(0), sent.unsqueeze(0), take, give, group=ranks.group, async_op=True)
    assert work is not None  # asynchronous calls return it

    def arrive() -> None:
        work.wait()

    return arrive
