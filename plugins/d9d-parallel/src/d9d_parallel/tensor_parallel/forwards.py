"""Forwards of modules whose parameters are shards, or whose inputs are a rank's own positions.

An instance of each class replaces ``module.forward``, so neither the module tree nor any parameter name changes. They
are objects, not closures, so that a deep copy of a module computes with its own parameters.

Shapes: B samples, S positions, R ranks, H features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_parallel.ranks import Ranks
from d9d_parallel.tensor_parallel.collectives import OwnPositions, gather, scatter_sum


class LocalShards:
    """Tensor-parallel forward with local shards as the module's parameters, so that no kernel handles a DTensor.

    Args:
        module: module whose forward is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward with local shards as its parameters."""
        return self.with_parameters({}, *args, **kwargs)

    def with_parameters(self, other: dict[str, Tensor | None], *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward with local shards, and with other tensors in place of some parameters."""
        # Modules look up their parameters in this dict at each access; FSDP2 and torch.func.functional_call change it,
        # too.
        own: dict[str, Any] = self.module._parameters  # noqa: SLF001
        replaced = {name: own[name] for name in own if name in other or isinstance(own[name], DTensor)}
        own.update({name: other[name] if name in other else local_of(tensor) for name, tensor in replaced.items()})
        try:
            return self.forward(*args, **kwargs)
        finally:
            own.update(replaced)


class RowForward(LocalShards):
    """Tensor-parallel forward of a row-wise linear layer: [B, S, features of this rank] to [B, S / R, H].

    Args:
        module: layer with ``weight`` and an optional ``bias``, which is added once: to the sum over ranks, or with
            ``scaled`` by the layer itself on the first rank.
        ranks: ranks that hold the other features.
        scaled: whether the layer itself scales its output, bias included.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, *, scaled: bool = False) -> None:
        super().__init__(module)
        self.ranks, self.scaled = ranks, scaled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the partial sum, and reduce-scatter it."""
        bias = getattr(self.module, "bias", None)
        if self.scaled:
            own: dict[str, Tensor | None] = {} if bias is None or self.ranks.rank == 0 else {"bias": None}
            return scatter_sum(self.with_parameters(own, *args, **kwargs), self.ranks)
        without: dict[str, Tensor | None] = {} if bias is None else {"bias": None}
        out = scatter_sum(self.with_parameters(without, *args, **kwargs), self.ranks)
        return out if bias is None else out + bias.to(out.dtype)


class OwnHeads:
    """Function that selects this rank's head from a weight of all heads.

    Args:
        heads: number of heads, less than the number of ranks.
        ranks: ranks; several of them compute the same head.
    """

    def __init__(self, heads: int, ranks: Ranks) -> None:
        self.heads, self.ranks = heads, ranks

    def __call__(self, weight: Tensor) -> Tensor:
        """Select the rows [features of a head, ...] of this rank's head from a weight [features of all heads, ...]."""
        whole: Tensor = local_of(weight)
        return whole.chunk(self.heads)[self.ranks.rank * self.heads // self.ranks.size]


class OwnHeadsForward(LocalShards):
    """Forward of a column-wise linear layer whose weight is whole on every rank; each rank computes only its own head.

    Args:
        module: layer with ``weight`` [features of all heads, H] and optional ``bias``.
        heads: number of heads, less than the number of ranks.
        ranks: ranks; several of them compute the same head.
    """

    def __init__(self, module: nn.Module, heads: int, ranks: Ranks) -> None:
        super().__init__(module)
        self.own = OwnHeads(heads, ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of this rank's head."""
        parameters = self.module._parameters.items()  # noqa: SLF001 - named_parameters() takes longer, in each call
        mine: dict[str, Tensor | None] = {name: self.own(tensor) for name, tensor in parameters if tensor is not None}
        return self.with_parameters(mine, *args, **kwargs)


class EmbeddingForward(LocalShards):
    """Forward of an embedding that is sharded over the vocabulary: token ids [B, S] to features [B, S / R, H].

    Args:
        module: embedding with this rank's rows of the weight.
        first: token id of this rank's first row.
        vocabulary: number of tokens of the whole vocabulary.
        ranks: ranks that hold the rows of all tokens.
    """

    def __init__(self, module: nn.Embedding, first: int, vocabulary: int, ranks: Ranks) -> None:
        super().__init__(module)
        self.first, self.vocabulary, self.ranks = first, vocabulary, ranks

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look up the tokens whose rows this rank has, and reduce-scatter the features over positions.

        Raises:
            IndexError: a token is not in the vocabulary. On a GPU its features are NaN instead, to avoid a
                synchronisation.
            ValueError: the ranks do not divide S.
        """
        weight = local_of(self.module.weight)
        unknown = (tokens < 0) | (tokens >= self.vocabulary)
        if not tokens.is_cuda and unknown.any():
            raise IndexError(
                f"token id {tokens[unknown][0]} is not in the vocabulary of {self.vocabulary} ids; use the model's "
                "tokenizer"
            )
        words = tokens - self.first
        elsewhere = (words < 0) | (words >= len(weight))
        if not len(weight):  # more ranks than tokens
            found = weight.sum() + weight.new_zeros(*tokens.shape, weight.shape[1])
        else:
            found = self._look_up(words.masked_fill(elsewhere, 0))
        features = scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.ranks)
        own = unknown.chunk(self.ranks.size, dim=1)[self.ranks.rank]
        return features.masked_fill(own.unsqueeze(-1), torch.nan)

    def _look_up(self, words: Tensor) -> Tensor:
        """Features of row indices on this rank, by the module's own forward, which may scale them."""
        module: Any = self.module
        padding = module.padding_idx
        found: Tensor
        if padding is None:
            found = self.with_parameters({}, words)
            return found
        own = padding - self.first
        # The padding token's row, which gets no gradient, has another index among this rank's rows, or none.
        module.padding_idx = own if 0 <= own < len(local_of(module.weight)) else None
        try:
            found = self.with_parameters({}, words)
        finally:
            module.padding_idx = padding
        return found


class OwnTokens:
    """Forward of an embedding whose weight is whole on every rank: token ids [B, S] to the features of own positions.

    Args:
        module: embedding.
        share: positions of this rank.
    """

    def __init__(self, module: nn.Embedding, share: OwnPositions) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.share = share

    def __call__(self, tokens: Tensor) -> Any:
        """Look up this rank's positions of the tokens."""
        return self.forward(self.share.own(tokens))


class WholeSequence:
    """Forward of a module that gathers all positions of its first argument.

    Args:
        module: module that takes hidden states [B, S, H], and may take shards of other modules' parameters.
        ranks: ranks with S / R positions each.
        summed: whether the gradients of all ranks add up, see :func:`~d9d_parallel.tensor_parallel.collectives.gather`.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, *, summed: bool) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.first = first_argument(module)
        self.ranks, self.summed = ranks, summed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the first argument, and call the module's forward.

        Raises:
            ValueError: a module that computes the same on all ranks got a parameter that is split over them.
        """
        hidden, *others = args or (kwargs.pop(self.first),)
        if not self.summed and any(isinstance(value, DTensor) for value in (*others, *kwargs.values())):
            raise ValueError(
                "tensor_parallel: a module of style whole got a weight that is split over tp, so it would use "
                "only this rank's share; give the module the style vocab and split_vocabulary(), see "
                "d9d_core.model.SplitsVocabulary"
            )
        others = [local_of(value) for value in others]
        kwargs = {name: local_of(value) for name, value in kwargs.items()}
        return self.forward(gather(hidden, self.ranks, summed=self.summed), *others, **kwargs)


class GatheredSequence(WholeSequence):
    """Forward of a module that gathers all positions of its first argument, and returns this rank's positions.

    Args:
        module: module that maps hidden states [B, S, H] to [B, S, ...], or to a tuple that begins with them.
        ranks: ranks with S / R positions each.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module, ranks, summed=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the first argument, call the module's forward, and return this rank's positions of its output."""
        out = super().__call__(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        own = first.chunk(self.ranks.size, dim=1)[self.ranks.rank].contiguous()
        return (own, *out[1:]) if isinstance(out, tuple) else own


def first_argument(module: nn.Module) -> str:
    """Name of the first argument of a module's forward, by which its caller may pass it."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def local_of(value: Any) -> Any:
    """Local shard of a DTensor, with its gradient; other values are returned unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def shard(module: nn.Module, name: str, mesh: Any, dim: int) -> nn.Parameter:
    """Replace a parameter on the meta device by a DTensor that is sharded over a mesh.

    Args:
        module: module that owns the parameter.
        name: name of the parameter in the module.
        mesh: mesh of one dimension.
        dim: dim of the parameter to shard; the last ranks may get less.

    Returns:
        The DTensor.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = module.get_parameter(name)
    with torch.no_grad():
        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    split = nn.Parameter(part, requires_grad=parameter.requires_grad)
    module.register_parameter(name, split)
    return split
