"""Models: the stage that a model plugin builds, and optional protocols of its modules.

Start here: a model's ``build(config, stage)`` returns an ``nn.Module`` for a :class:`Stage`, under the meta device. Its
modules with parameters initialise them later (:class:`d9d_core.traits.LateInit`)::

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

All other protocols are optional. :class:`PositionShare`, :class:`ContextShare`, :class:`SplitsContext`,
:class:`SeesContext`, :class:`SharesAttention` and :class:`GathersLatents` complement the trait
:class:`~d9d_core.traits.ContextParallelizable`. :class:`SeesOneDocument` complements no trait; all others complement
the trait :class:`~d9d_core.traits.TensorParallelizable`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from d9d_core.deferral import Deferral

__all__ = [
    "ComputesInputs", "ContextShare", "GathersLatents", "HasHeads", "HasLinearTerms", "LendsProduct", "MultipliesRows",
    "PositionShare", "SeesContext", "SeesSequence", "SequenceShare", "SharesAttention", "SharesInputs", "SplitsContext",
    "SplitsFeatures", "SplitsSequence", "SplitsVocabulary", "Stage", "TermKind", "VocabularyShare",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage of a model to build: number ``index`` of ``count``.

    Attributes:
        layers: number of layers of each stage, if the job sets it; ``None`` lets the model balance the stages.
    """

    index: int = 0
    count: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage receives the model's inputs, such as tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the model's heads."""
        return self.index == self.count - 1


@runtime_checkable
class HasHeads(Protocol):
    """Optional protocol for tensor parallelism: a module with projections that are split by whole attention heads."""

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Number of attention heads of each column-wise child (style ``COLUMN``), by the child's relative name.

        Ranks divide the heads evenly; if there are fewer heads than ranks, several ranks compute the same head.
        """
        ...


@runtime_checkable
class MultipliesRows(Protocol):
    """Optional protocol: a module that calls some of its modules with more rows than the microbatch has samples."""

    def row_factors(self) -> Mapping[str, int]:
        """Relative name of each such module -> number of rows per sample, over all its calls in a training step."""
        ...


@runtime_checkable
class ComputesInputs(Protocol):
    """Optional protocol for tensor parallelism: a module that computes the inputs of some of its projections itself.

    A column-wise child (style ``COLUMN``) of a module without this protocol may read the module's first argument, and
    a strategy may compute the child's product from this argument in advance.
    """

    def computed_inputs(self) -> Collection[str]:
        """Relative names of the column-wise children that do not read the first argument."""
        ...


#: Role of a module inside a linear layer. ``in`` is linear and reads the layer's input; ``out`` is linear and adds to
#: the layer's output; ``in_scale`` and ``out_scale`` have a weight with one element per input or output feature.
TermKind = Literal["in", "out", "in_scale", "out_scale"]


@runtime_checkable
class HasLinearTerms(Protocol):
    """Optional protocol for tensor parallelism: a linear layer that contains other modules, such as an adapter."""

    def tensor_parallel_terms(self) -> Mapping[str, TermKind]:
        """Relative name of each contained module -> its role, see :data:`TermKind`."""
        ...


@runtime_checkable
class SplitsFeatures(Protocol):
    """Optional addition to :class:`HasLinearTerms`: a layer that also reads weights of its contained modules."""

    def split_features(self, own: Callable[[Tensor], Tensor], add_up: Callable[[Tensor], Tensor] | None = None) -> None:
        """From now on, compute with this rank's share of the output or input features.

        Args:
            own: differentiable function that returns this rank's shard of a contained module's weight.
            add_up: sums tensors of equal shape over the ranks, if they split the input features; forward only,
                collective over the ranks.
        """
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """Optional addition to :class:`HasLinearTerms`: a layer that draws random numbers for its inputs (dropout)."""

    def share_inputs(self, part: int, parts: int) -> None:
        """From now on, treat this rank's inputs as part ``part`` of ``parts`` equal parts of the input features.

        Random generators have the same state on all ranks. So a layer that draws numbers for all features, and uses
        only the numbers for its own part, computes the same as a single process.

        Args:
            part: index of the part.
            parts: number of parts.
        """
        ...


@runtime_checkable
class LendsProduct(Protocol):
    """Optional protocol for tensor parallelism: a linear layer whose matrix product another module may compute.

    The other module overlaps the product with communication of the layer's inputs or outputs, and fuses products that
    read the same inputs. If a row-wise layer lends its product, the product and the outputs of contained modules of
    role ``in`` are already summed over the ranks, at this rank's positions; the layer then adds biases and the outputs
    of its other contained modules.
    """

    @property
    def deferral(self) -> Deferral | None:
        """Object through which the lent product may defer the weight's gradient; ``None`` to compute it at once."""
        ...

    def lend_product(self, compute: Callable[[Tensor], Tensor | None]) -> bool:
        """From now on, let a function compute ``rows @ weight.T``; the layer adds biases and outputs of its modules.

        Args:
            compute: rows [..., in features] -> product, differentiable; ``None`` leaves the product to the layer.

        Returns:
            Whether the layer will call the function; false if it computes in another number format, such as fp8.
        """
        ...


@runtime_checkable
class SplitsSequence(Protocol):
    """Optional protocol for tensor parallelism: a stage that supports sequence-parallel hidden states."""

    def split_sequence(self, ranks: int) -> None:
        """From now on, expect S / ``ranks`` positions in hidden states, also at stage boundaries."""
        ...


class SequenceShare(Protocol):
    """Access to all positions, for modules of style ``SEQUENCE`` if ``tp`` splits the positions."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather [B, S / tp, ...] to [B, S, ...] for identical computation on all ranks. Collective over ``tp``.

        The backward keeps this rank's positions of the gradient, without communication. So the module's output at a
        position may depend on the gathered tensor at the same position only, or must not be differentiated with respect
        to other positions. A module that mixes positions belongs inside a module with children of style ``COLUMN``,
        which has all positions.
        """
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """Positions of this rank, [B, S / tp, ...], from [B, S, ...]."""
        ...


@runtime_checkable
class SeesSequence(Protocol):
    """Optional protocol for tensor parallelism: a module of style ``SEQUENCE`` that also needs other positions."""

    def see_sequence(self, share: SequenceShare) -> None:
        """Expect this rank's positions in inputs and outputs from now on, and gather all positions if necessary."""
        ...


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """Share of the vocabulary on one rank.

    Attributes:
        first: first token id of the share.
        size: number of token ids in the share, possibly zero.
        group: process group of the ranks that split the vocabulary.
    """

    first: int
    size: int
    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShare:
        """Return the same object: copies of a head use the same ranks, and a process group cannot be copied."""
        return self


@runtime_checkable
class SplitsVocabulary(Protocol):
    """Optional protocol for tensor parallelism: a head whose weight may be split over the vocabulary.

    A head that has no weight because it is tied to the embedding also has an attribute ``vocabulary``: the number of
    rows of the embedding.
    """

    def split_vocabulary(self, share: VocabularyShare) -> None:
        """From now on, compute with a share of the vocabulary; outputs must equal the outputs of a single process.

        The gradient of the hidden states is then a partial sum over the ranks.
        """
        ...


class PositionShare(Protocol):
    """Split of each sample's positions over ``cp``. A rank's positions need not be contiguous."""

    @property
    def ranks(self) -> int:
        """Number of ranks that split the positions of a sample."""
        ...

    def own(self, tensor: Tensor) -> Tensor:
        """Positions of this rank, [B, S / cp, ...], from [B, S, ...], on the same device.

        Raises:
            ValueError: the ranks cannot split S positions evenly.
        """
        ...


class ContextShare(PositionShare, Protocol):
    """Split of the positions over ``cp``, with a method that all-gathers them."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather [B, S / cp, ...] to [B, S, ...], in the order of the sample.

        The backward sums the gradients over all ranks, so the ranks must compute different outputs, or different parts
        of one output, from the result. Collective over ``cp``, in forward and backward.
        """
        ...


@runtime_checkable
class SplitsContext(Protocol):
    """Optional protocol for context parallelism: a stage that supports inputs with only this rank's positions."""

    def split_context(self, share: ContextShare) -> None:
        """From now on, expect this rank's positions: inputs are [B, S / cp], but ``documents`` is [B, S].

        Attention masks cover all S positions; attention cores learn from :meth:`SharesAttention.see_queries` at which
        positions their queries are.

        Raises:
            BuildError: the stage computes something that needs all positions.
        """
        ...


@runtime_checkable
class SeesOneDocument(Protocol):
    """Optional protocol of a stage with modules that mix tokens of different documents in a sample."""

    def token_mixers(self) -> Sequence[str]:
        """Names of modules, other than attention, that mix tokens across documents; empty if there are none."""
        ...


@runtime_checkable
class SeesContext(Protocol):
    """Optional protocol for context parallelism: a module other than an attention core that needs all positions."""

    def see_context(self, share: ContextShare) -> None:
        """Expect this rank's positions in inputs and outputs from now on, and gather all positions if necessary.

        Tallies count this rank's positions only. Losses are computed over all positions, on each rank.
        """
        ...


@runtime_checkable
class SharesAttention(Protocol):
    """Optional protocol for context parallelism: an attention core that can compute the attention of some positions.

    A core without this protocol receives all positions and some of the heads.
    """

    def attention_heads(self) -> tuple[int, int]:
        """Number of query heads, and of key and value heads, of the whole model."""
        ...

    def head_features(self) -> int:
        """Number of features of a head."""
        ...

    def see_queries(self, share: ContextShare) -> None:
        """From now on, expect this rank's queries [B, S / cp, N, D], and all keys and values [B, S, K, D]."""
        ...

    def attend_by(self, function: Callable[..., Tensor]) -> None:
        """From now on, compute attention by ``function`` instead of the attention backend.

        Args:
            function: ``(query, key, value, documents, window)``, and then ``sinks`` [N] if the core has learned sinks:
                query, key and value have shape [B, S / cp, heads, D];
                ``documents`` is int64 [B, S], or ``None`` if a sample is one document; ``window`` is the number of
                positions that a query sees, or ``None`` for all earlier positions. Returns [B, S / cp, N, D]. If the
                function has ``prepare(documents, length, window, device)``, ``documents`` may be replaced by its
                result, which is computed once for all layers. If the function has op slots
                (:class:`d9d_core.traits.HasOps`), the core lists them as its own, and adds facts about its attention to
                their static facts. The function computes causal attention, unless its attribute ``mask_kinds`` names
                other kinds (:mod:`d9d_core.attention`); ``prepare`` then gets the kind as the keyword ``mask``, and
                ``documents`` may have blocks.

        Raises:
            BuildError: the function does not compute the core's kind of mask.
        """
        ...


@runtime_checkable
class GathersLatents(Protocol):
    """Optional protocol for context parallelism: an attention core whose keys and values are computed from latents.

    A strategy that would otherwise gather keys and values of all positions calls :meth:`gather_by` after
    :meth:`SharesAttention.see_queries`. The core then gathers the latents, which are smaller, and the module around it
    computes keys and values of all positions.
    """

    def latent_features(self) -> int:
        """Number of elements of a position that the core gathers."""
        ...

    def gather_by(self, share: ContextShare) -> None:
        """From now on, gather the latents of all positions by ``share.gather``, in one call for all latents."""
        ...
