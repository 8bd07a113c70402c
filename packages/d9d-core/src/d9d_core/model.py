"""Models: stages as model plugins are asked to build them, and optional protocols of their modules.

Start here: a model's ``build(config, stage)`` returns an ``nn.Module`` for a :class:`Stage`, under the meta device. Its
modules with parameters say how they are filled (:class:`d9d_core.traits.LateInit`)::

    import torch
    from torch import nn

    class Line(nn.Module):
        def __init__(self, config, stage):
            super().__init__()
            self.slope = nn.Parameter(torch.empty(()))

        def reset_parameters(self):
            nn.init.ones_(self.slope)

        def forward(self, x):
            return {"y": self.slope * x}

All other protocols are optional. :class:`ContextShare`, :class:`SplitsContext`, :class:`SeesContext` and
:class:`SharesAttention` go with the trait :class:`~d9d_core.traits.ContextParallelizable`, the others with
:class:`~d9d_core.traits.TensorParallelizable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from d9d_core.deferral import Deferral

__all__ = [
    "ContextShare", "HasHeads", "HasLinearTerms", "LendsProduct", "PositionShare", "SeesContext", "SeesSequence",
    "SequenceShare", "SharesAttention", "SharesInputs", "SplitsContext", "SplitsFeatures", "SplitsSequence",
    "SplitsVocabulary", "Stage", "TermKind", "VocabularyShare",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a model to build: number ``index`` of ``count``.

    Attributes:
        layers: how many layers each stage has, if the job says so; ``None`` leaves it to the model.
    """

    index: int = 0
    count: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage receives tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the head."""
        return self.index == self.count - 1


@runtime_checkable
class HasHeads(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a module some of whose children compute whole heads."""

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Numbers of heads of children of style ``COLUMN``, keyed by relative name.

        Ranks share them evenly; where there are fewer heads than ranks, several ranks compute the same head.
        """
        ...


#: Kind of a module inside a linear layer: ``in`` is linear and reads the layer's input, ``out`` is linear and adds to
#: its output; ``in_scale`` and ``out_scale`` have a weight with a number for each feature of its input or output.
TermKind = Literal["in", "out", "in_scale", "out_scale"]


@runtime_checkable
class HasLinearTerms(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a linear layer with further modules inside."""

    def tensor_parallel_terms(self) -> Mapping[str, TermKind]:
        """Children by relative name, see :data:`TermKind`."""
        ...


@runtime_checkable
class SplitsFeatures(Protocol):
    """Protocol, beside :class:`HasLinearTerms`, of a layer that reads weights of its terms, besides calling them."""

    def split_features(self, own: Callable[[Tensor], Tensor], add_up: Callable[[Tensor], Tensor] | None = None) -> None:
        """Hold a share of the output or the input features from now on.

        Args:
            own: part of a weight of one of its terms that this rank computes with, with its gradient.
            add_up: sum over the ranks of what each has of one shape, where they share the input features; forward
                only, and collective over them.
        """
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """Protocol, beside :class:`HasLinearTerms`, of a layer that draws random numbers for its inputs (dropout)."""

    def share_inputs(self, part: int, parts: int) -> None:
        """Take note that this rank's inputs are one of equal parts of the input features, from now on.

        Generators are at the same place on all ranks: a layer that draws for all features, and uses its own part of the
        numbers, draws what one process draws.

        Args:
            part: number of the part.
            parts: how many there are.
        """
        ...


@runtime_checkable
class LendsProduct(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a linear layer whose product may be computed elsewhere.

    There it overlaps with the exchange of its rows or outputs, and is one with those of layers that read the same rows.
    Of a row-wise layer, the product and what its terms of kind ``in`` return are then sums over the ranks, at this
    rank's positions, to which the layer adds the rest.
    """

    @property
    def deferral(self) -> Deferral | None:
        """Deferral of the weight's gradient, which whoever computes the product keeps to."""
        ...

    def lend_product(self, compute: Callable[[Tensor], Tensor | None]) -> bool:
        """Ask a function for the product ``rows @ weight.T``, from now on; biases and terms stay with the layer.

        Args:
            compute: rows [..., in features] -> product, with its gradients; ``None`` leaves it to the layer.

        Returns:
            Whether it will be asked: a layer that computes in a format of its own has another product.
        """
        ...


@runtime_checkable
class SplitsSequence(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a stage whose hidden states may hold some positions only."""

    def split_sequence(self, ranks: int) -> None:
        """Take note that hidden states, also those that cross stage boundaries, hold S / ``ranks`` positions each."""
        ...


class SequenceShare(Protocol):
    """Share of the positions on one rank of ``tp``, for modules that need something of all of them."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather [B, S / tp, ...] of all ranks to [B, S, ...], from which all of them compute the same. Collective."""
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's positions [B, S / tp, ...] of [B, S, ...]."""
        ...


@runtime_checkable
class SeesSequence(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a module of style ``SEQUENCE`` that looks across them."""

    def see_sequence(self, share: SequenceShare) -> None:
        """Take a share of the positions as input and output from now on, and all of them for what needs them."""
        ...


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """Share of the vocabulary on one rank.

    Attributes:
        first: first word of the share.
        words: number of its words, which may be none.
        group: the ranks that hold the others.
    """

    first: int
    words: int
    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShare:
        """Share itself: copies of a head talk to the same ranks, and a group cannot be copied."""
        return self


@runtime_checkable
class SplitsVocabulary(Protocol):
    """Protocol, beside the trait of tensor parallelism, of a head whose weight may be a share of the vocabulary."""

    def split_vocabulary(self, share: VocabularyShare) -> None:
        """Compute, from now on, with a share of the words, and return what all ranks together would.

        The gradient of the hidden states is then a partial sum.
        """
        ...


class PositionShare(Protocol):
    """Share of each sample's positions on one rank of ``cp``. It is no run of positions: which they are, it knows."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share the positions of a sample."""
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's positions [B, S / cp, ...] of [B, S, ...], on the same device.

        Raises:
            ValueError: the ranks cannot share S positions evenly.
        """
        ...


class ContextShare(PositionShare, Protocol):
    """Share of the positions, with a way to those of the other ranks."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather [B, S / cp, ...] of all ranks to [B, S, ...], in the order of the sample.

        Ranks compute different things from it, or each its part of the same: gradients of all of them add up.
        Collective over ``cp``, forward and backward.
        """
        ...


@runtime_checkable
class SplitsContext(Protocol):
    """Protocol, beside the trait of context parallelism, of a stage whose inputs may hold a rank's positions only."""

    def split_context(self, share: ContextShare) -> None:
        """Take a rank's own positions from now on: tokens and all else [B, S / cp], but ``documents`` [B, S].

        Masks are made for all S positions, as attention cores are told which of them are their queries'.

        Raises:
            BuildError: the stage computes something that needs all positions.
        """
        ...


@runtime_checkable
class SeesContext(Protocol):
    """Protocol, beside the trait of context parallelism, of a module that looks across positions, and is no core."""

    def see_context(self, share: ContextShare) -> None:
        """Take a share of the positions as input and output from now on, and all of them for what needs them.

        Sums that it counts are of its own positions. Losses are of all of them, on each rank.
        """
        ...


@runtime_checkable
class SharesAttention(Protocol):
    """Protocol, beside the trait of context parallelism, of a core that computes a part of the attention of a sample.

    A core without it gets all positions, and some of the heads.
    """

    def attention_heads(self) -> tuple[int, int]:
        """Number of query heads, and of key and value heads, of the whole model."""
        ...

    def head_features(self) -> int:
        """Number of features of a head."""
        ...

    def see_queries(self, share: ContextShare) -> None:
        """Take a rank's own queries [B, S / cp, N, D], and keys and values [B, S, K, D], from now on."""
        ...

    def attend_by(self, function: Callable[..., Tensor]) -> None:
        """Let a function attend from now on, in the place of any backend.

        Args:
            function: ``(query, key, value, documents, window)`` with [B, S / cp, heads, D] each, ``documents`` int64
                [B, S] or ``None`` if a sample is one document, and the number of positions that a query sees or
                ``None`` for all earlier ones; returns what the query heads see, [B, S / cp, N, D]. If it has
                ``prepare(documents, length, window, device)``, it may get what that returned in the place of
                ``documents``, made once for all layers. If it has op slots (:class:`d9d_core.traits.HasOps`), the core
                lists them as its own, and adds what it knows of its attention to their static facts.
        """
        ...
