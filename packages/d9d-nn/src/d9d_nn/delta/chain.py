"""Recurrent layers on a rank of context parallelism, which has two chunks of each sample's positions.

The state after a chunk is an affine function of the state X before it, ``M X + U``, for each head. Each rank computes
M and U of its own chunks, all ranks gather M and U of all chunks, and each rank composes the functions of the chunks
before its own: the exchanged bytes do not depend on the length of samples. The outputs of a chunk are ``O + P X``. If a
document begins inside a chunk, M is zero, and P is zero from this position on.

For Gated DeltaNet, M is a matrix. Its rule runs once, on values with D_k further features that are zero, from the state
``[0 | 1]``: the outputs are ``[O | P]`` and the last state is ``[U | M]``. This is the op ``gated_delta_rule_from``,
which a backend may compute; its reference is :func:`~d9d_nn.ops.gated_delta_rule.chunked_from`. For state-space models,
M is a number, the decay over the chunk, and P of a position is its vector C times the decay from the start of the
chunk.

A short convolution needs the last W - 1 positions before each chunk, which are gathered too.

Shapes: B samples, R ranks, L positions of a chunk (S = 2 R L), F features, W positions that a convolution reads, K key
heads, N value heads, D_k and D_v features of a key and value head. Chunks of a rank are stacked as samples, [2 B, L].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, Kind, StepShape
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from d9d_nn.delta.short_convolution import ShortConvolution
from d9d_nn.ops.gated_delta_rule import without_autocast
from d9d_nn.ops.state_space_rule import chunked_with_state

__all__ = ["ContextChain"]


class ContextChain:
    """Computes recurrent layers on a rank's own chunks, with the same results as on whole samples.

    Args:
        share: share of the positions: two chunks of equal length for each rank, in the order of positions.
    """

    def __init__(self, share: ContextShare) -> None:
        self.share = share
        numbers = torch.arange(2 * share.ranks, device="cpu").unsqueeze(0)
        #: Indices of this rank's chunks, out of 2 R.
        self.chunks: list[int] = share.own(numbers)[0].tolist()

    def convolve(
        self, layers: Sequence[ShortConvolution], inputs: Sequence[Tensor], documents: Tensor | None
    ) -> list[Tensor]:
        """Apply short convolutions of equal width. Collective over ``cp``, in forward and backward.

        Args:
            layers: one convolution for each input.
            inputs: [B, 2 L, F] each, this rank's positions.
            documents: int64 [B, S], numbered by :func:`~d9d_nn.ops.gated_delta_rule.counted`; ``None`` if a sample is
                one document.

        Returns:
            [2 B, L, F] for each input.
        """
        before = layers[0].weight.shape[1] - 1
        sizes = [one.shape[-1] for one in inputs]
        halos = torch.split(self._before_chunks(torch.cat(list(inputs), dim=-1), before), sizes, dim=-1)
        numbers = None if documents is None else self._of_chunks(documents, before)
        parts = zip(layers, inputs, halos, strict=True)
        return [layer(torch.cat([halo, stacked(x)], dim=1), numbers)[:, before:] for layer, x, halo in parts]

    def rule(
        self,
        rule_from: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        """Gated delta rule. Collective over ``cp``, in forward and backward.

        Args:
            rule_from: op ``gated_delta_rule_from``, see :func:`~d9d_nn.ops.gated_delta_rule.chunked_from`.
            query: [2 B, L, K, D_k].
            key: [2 B, L, K, D_k].
            value: [2 B, L, N, D_v].
            decay: float32 [2 B, L, N].
            beta: [2 B, L, N].
            documents: int64 [B, S], numbered as for :meth:`convolve`; ``None`` if a sample is one document.

        Returns:
            [2 B, L, N, D_v] in the dtype of ``value``.
        """
        heads, of_keys, of_values = value.shape[2], key.shape[-1], value.shape[-1]
        identity = torch.eye(of_keys, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
        begun = functional.pad(identity, (of_values, 0)).expand(len(value), heads, -1, -1)
        if documents is not None:
            # A document that begins with the chunk does not continue the state.
            numbers = self._of_chunks(documents, 1)
            begun = begun * (numbers[:, 0] == numbers[:, 1]).view(-1, 1, 1, 1)
            documents = numbers[:, 1:]
        out, last = rule_from(begun, query, key, functional.pad(value, (0, of_keys)), decay, beta, documents)
        functions = self.share.gather(torch.unflatten(last, 0, (-1, 2)))
        plain, response = torch.split(out, [of_values, of_keys], dim=-1)
        with without_autocast(value):
            read: Tensor = torch.einsum("blnd,bndv->blnv", response, self._states(functions, of_values))
        return (plain + read).to(value.dtype)

    def state_space_rule(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, documents: Tensor | None
    ) -> Tensor:
        """State-space rule, see :func:`~d9d_nn.ops.state_space_rule.state_space_rule`, on this rank's chunks.

        Collective over ``cp``, in forward and backward. A is [N], ``documents`` are as in :meth:`convolve`, and all
        other tensors, including the result, have the shape [2 B, L, ...].
        """
        numbers = None if documents is None else self._of_chunks(documents, 1)
        out, last = chunked_with_state(x, dt, A, B, C, None if numbers is None else numbers[:, 1:])
        decay = (dt * A).to(last.dtype).cumsum(1).exp()  # [2 B, L, N]
        if numbers is not None:
            decay = decay * (numbers[:, 1:] == numbers[:, :1])[..., None]
        # Each chunk's function as a row [U | M], where M is a number.
        rows = torch.cat([last.flatten(2), decay[:, -1, :, None]], dim=-1).unsqueeze(2)
        with without_autocast(x):
            states = self._states(self.share.gather(torch.unflatten(rows, 0, (-1, 2))), rows.shape[-1] - 1)
            by_group = states.view(len(x), B.shape[2], -1, *last.shape[2:])
            read = torch.einsum("blgk,bgrkv->blgrv", C.to(last.dtype), by_group).flatten(2, 3)
        return (out + decay[..., None] * read).to(x.dtype)

    def collectives(self, step: StepShape, *, width: int, features: int, numbers: int) -> Iterator[ContextCall]:
        """All-gathers of the positions before chunks and of the states, and the reductions of their gradients.

        Their bytes do not depend on the length of samples, unless chunks are shorter than the convolutions.

        Args:
            step: shape of the step.
            width: positions that a short convolution reads.
            features: F, of all convolutions of this rank.
            numbers: elements of M and U of one chunk, over all heads of this rank.
        """
        before = width - 1 if step.positions is None else min(width - 1, step.positions // 2)
        chunks = step.samples * 2 * self.share.ranks
        ends, states = chunks * before * features * step.itemsize, chunks * numbers * max(step.itemsize, 4)
        kinds: tuple[tuple[bool, Kind], ...] = ((False, "all_gather"), (True, "reduce_scatter"))
        for backward, kind in kinds:
            what = "gradients of " if backward else ""
            yield ContextCall(kind, ends, f"{what}positions before chunks", backward)
            yield ContextCall(kind, states, f"{what}states of chunks", backward)

    def _states(self, functions: Tensor, of_values: int) -> Tensor:
        """States before this rank's chunks [2 B, N, D_k, D_v], from [U | M] of all chunks, [B, 2 R, N, D_k, ...]."""
        added, factor = torch.split(functions, [of_values, functions.shape[-1] - of_values], dim=-1)
        states = [torch.zeros_like(added[:, 0])]
        for chunk in range(max(self.chunks)):
            states.append(added[:, chunk] + factor[:, chunk] @ states[-1])
        return torch.stack([states[chunk] for chunk in self.chunks], dim=1).flatten(0, 1)

    def _before_chunks(self, x: Tensor, count: int) -> Tensor:
        """Last ``count`` positions before each own chunk, [2 B, count, F], of x [B, 2 L, F]; zeros before a sample."""
        length = x.shape[1] // 2
        each = min(length, count)  # if chunks are shorter than count, whole chunks are gathered
        ends = self.share.gather(
            torch.unflatten(x, 1, (2, length))[:, :, length - each :].flatten(1, 2)
        )  # [B, 2 R each, F]
        found = []
        for chunk in self.chunks:
            last = chunk * each
            there = ends[:, max(0, last - count) : last]
            found.append(functional.pad(there, (0, 0, count - there.shape[1], 0)))
        return torch.stack(found, dim=1).flatten(0, 1)

    def _of_chunks(self, documents: Tensor, before: int) -> Tensor:
        """Documents of each own chunk and of the ``before`` positions before it, [2 B, before + L], from [B, S]."""
        length = documents.shape[1] // (2 * self.share.ranks)
        padded = functional.pad(documents, (before, 0))
        found = [padded[:, chunk * length : (chunk + 1) * length + before] for chunk in self.chunks]
        return torch.stack(found, dim=1).flatten(0, 1)


def stacked(x: Tensor) -> Tensor:
    """Stack a rank's two chunks of positions as samples: [B, 2 L, ...] to [2 B, L, ...]."""
    return torch.unflatten(x, 1, (2, -1)).flatten(0, 1)


def joined(x: Tensor) -> Tensor:
    """Join chunks that :func:`stacked` separated: [2 B, L, ...] to [B, 2 L, ...]."""
    return torch.unflatten(x, 0, (-1, 2)).flatten(1, 2)


def head_ranks(weight: Tensor) -> int:
    """Number of ranks of ``tp`` that a weight is split over."""
    names = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
    return weight.device_mesh.size(names.index("tp")) if isinstance(weight, DTensor) and "tp" in names else 1
