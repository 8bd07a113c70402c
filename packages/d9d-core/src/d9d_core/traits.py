"""Traits: small protocols by which a model's modules describe themselves to strategies and to the training loop.

Start here: :class:`LateInit`, which every module with parameters needs, and :class:`HasBlocks`, the repeated blocks
on which most strategies act::

    from torch import nn

    class Backbone(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(layers)})

        def blocks(self):
            return {f"layers.{name}": layer for name, layer in self.layers.items()}

A strategy searches the modules of a stage for the trait that it needs. ``ModelSpec.provides`` declares the same traits
as tokens (``model:blocks``), so that a missing trait is an error before anything is built; the conformance suite for
models checks that both agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from d9d_core.kernel import OpSlot

if TYPE_CHECKING:
    from torch import Tensor, nn

    from d9d_core.deferral import Deferral
    from d9d_core.types import TensorSpec

__all__ = [
    "TRAITS", "Adapts", "AddsLosses", "ContextParallelizable", "DefersWeights", "Dispatched", "Dispatcher",
    "Divisible", "HasAdjacentWeights", "HasBanks", "HasBlocks", "HasExperts", "HasOps", "HasTallies",
    "InputTargets", "LateInit", "LayoutDependent", "LossTerm", "ObservesOnDemand", "PipelineStage", "Routing",
    "TensorParallelizable", "TensorStyle", "Transfer", "modules_with",
]  # fmt: skip

T_co = TypeVar("T_co", covariant=True)


class TensorStyle(StrEnum):
    """Style in which a child module may be split over the ranks of ``tp``.

    Attributes:
        COLUMN: weight [out, in] split over out; output features are split.
        ROW: weight [out, in] split over in; input features are split, and the output is a partial sum.
        VOCAB: weight [vocabulary, features] split over the vocabulary: an embedding, or a head that has
            :class:`~d9d_core.model.SplitsVocabulary`.
        SEQUENCE: weight replicated, tokens split over the sequence; weight gradients are partial sums.
        HEADS: all parameters split over their first dimension, in which each head has an equal share; a rank computes
            its own heads.
        PARTIAL: weight replicated, applied to a rank's own heads; weight gradients are partial sums.
        WHOLE: weight replicated, the whole sequence on every rank; all ranks compute the same.
        GATHERED: weights replicated, for attention that cannot be split: the module receives all positions in its first
            argument, and its output, or the first of its outputs, is cut to a rank's own positions; weight gradients
            are partial sums.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    SEQUENCE = "sequence"
    HEADS = "heads"
    PARTIAL = "partial"
    WHOLE = "whole"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class InputTargets:
    """Unit of a loss term with its own targets: each element of an input of the model that is not -100 counts once.

    Attributes:
        input: name of the input, integers [B, S, D]; the task gives it to every stage.
        index: index of the term's targets in the input's last dimension.
    """

    input: str
    index: int


@dataclass(frozen=True, slots=True)
class LossTerm:
    """Loss term that a module adds to a step: ``coefficient * (its sum over the batch) / (its units in the batch)``.

    Attributes:
        coefficient: factor of the term in the total loss.
        per: unit over which the term is summed and averaged: ``sample``, ``position`` of a sample, or its own targets.
            If the task's inputs have ``lengths`` (:mod:`d9d_core.data`), padding positions and samples of length zero
            do not count. A term with its own targets is summed over the positions of the rank only, a term per sample
            or per position always over whole samples.
    """

    coefficient: float
    per: Literal["sample", "position"] | InputTargets


@runtime_checkable
class LateInit(Protocol):
    """``model:late_init``: the module owns parameters or buffers and can initialise them after materialisation."""

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters and buffers (not its children's), with torch's default generator."""
        ...


@runtime_checkable
class HasBlocks(Protocol):
    """``model:blocks``: the module is mostly a chain of similar blocks."""

    def blocks(self) -> Mapping[str, nn.Module]:
        """Blocks in order of execution, keyed by their name relative to this module."""
        ...


@runtime_checkable
class TensorParallelizable(Protocol):
    """``model:tensor_parallel``: the module declares how its children may be split over ``tp``.

    Between the modules of a stage, positions are split: each rank holds S / tp of them. The strategy gathers all
    positions for the first argument of a module with children of style ``COLUMN``; its ``ROW`` children return the
    rank's own positions. Embeddings of style ``VOCAB`` receive all token ids, and return the rank's own positions. For
    output heads of style ``VOCAB`` and modules of style ``WHOLE``, the strategy gathers all positions of the first
    argument, and passes their output on unchanged. Every parameter of the stage must belong to a child with a style.
    :mod:`d9d_core.model` has further, optional protocols.
    """

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the children, keyed by their name relative to this module."""
        ...


@runtime_checkable
class ContextParallelizable(Protocol):
    """``model:context_parallel``: the module names the submodules in which tokens attend to each other."""

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """Attention cores by relative name: modules that receive queries, keys and values."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """``model:experts``: the module sends each token to some of its experts.

    Attributes:
        dispatcher: object that sends tokens to the experts and combines outputs; replaced by expert parallelism.
    """

    dispatcher: Dispatcher

    def expert_banks(self) -> Mapping[str, nn.Module]:
        """Modules with stacked expert weights (banks) by relative name; their parameters' dimension 0 is the expert."""
        ...


class Routing(Protocol):
    """Result of a router for T tokens and E experts, k experts per token; used by modules with :class:`HasExperts`."""

    @property
    def indices(self) -> Tensor:
        """Experts of each token, int64 [T, k]. Index E, after the last expert, means no expert; its weight is zero."""
        ...

    @property
    def weights(self) -> Tensor:
        """Weights of the experts' outputs in a token's output, [T, k]; float32 or wider."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of rows of each expert, int64 [E], on the device of the indices."""
        ...

    @property
    def limit(self) -> int | None:
        """Largest possible number of rows per expert, from shapes alone; ``None`` if unlimited."""
        ...

    @property
    def incomplete(self) -> bool:
        """Whether some indices may be E (no expert), for example for padding; known without synchronization."""
        ...


class Dispatched(NamedTuple):
    """Tokens dispatched to the experts of this rank: R rows of H features.

    Attributes:
        tokens: [R, H], sorted by expert.
        counts: int64 [experts of this rank], number of rows of each expert, on the device of the tokens.
        spare_rows: whether there may be padding rows after the counted rows; they belong to no token.
        handle: data for :meth:`Dispatcher.combine` of the same dispatcher.
    """

    tokens: Tensor
    counts: Tensor
    spare_rows: bool
    handle: Any


class Transfer(Protocol[T_co]):
    """Communication in progress. Computation between its start and :meth:`wait` overlaps with it."""

    def wait(self) -> T_co:
        """Return the result; call once. Device work that is launched afterwards runs after the data has arrived."""
        ...


class Dispatcher(Protocol):
    """Dispatch of tokens to experts, and combine of the experts' outputs, for modules with :class:`HasExperts`.

    Gradients are communicated back by the reverse operations.

    A dispatcher that communicates with other ranks has their process group as attribute ``group``, so that a schedule
    that overlaps forwards with backwards finds communication to hide.

    A dispatcher whose communication no compiler can trace may have a method ``outside_graph(function, *args)``, which
    calls the function. A layer passes the whole computation from dispatch to combine to this method, which causes one
    graph break instead of several.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> Transfer[Dispatched]:
        """Start the dispatch of tokens [T, H] to their experts. Collective over the ranks that hold the experts."""
        ...

    def combine(self, outputs: Tensor, handle: Any) -> Transfer[Tensor]:
        """Start the combine of outputs [R, H], in the order of dispatch, to [T, H]: sums weighted by the routing.

        Collective over the ranks that hold the experts. Sums are computed in float32 or wider; they are rounded to the
        dtype of the outputs before they are sent, and once at the end.
        """
        ...


@runtime_checkable
class HasBanks(Protocol):
    """``model:banks``: the module multiplies rows with banks, which are stacked weight matrices, one per expert.

    A fine-tuning method may add a module to a product: the module is called with the same rows, counts and
    ``spare_rows`` as the product, and its result is added to the product. The module's parameters, too, have the expert
    index as dimension 0.
    """

    def banks(self) -> Mapping[str, nn.Parameter]:
        """Relative name -> bank, each [experts, input features, output features]."""
        ...

    def bank_terms(self) -> nn.ModuleDict:
        """Relative name of a bank -> module that a fine-tuning method added to its product; initially empty."""
        ...


@runtime_checkable
class AddsLosses(Protocol):
    """``model:losses``: the module adds its own terms to the task's loss.

    Its forward stores the sum of each term over the microbatch in a buffer, and injects the gradient of ``sum *
    factor`` into its output (:func:`d9d_nn.auxiliary_loss.add_auxiliary_loss`). So a term need not pass through the
    model's outputs and pipeline stages. The numbers of units (:attr:`LossTerm.per`) depend on the inputs only, so
    factors are known before the first forward.
    """

    def loss_terms(self) -> Mapping[str, LossTerm]:
        """Name -> loss term. Terms of the same name in several modules must be equal; their sums add up."""
        ...

    def loss_factors(self) -> Mapping[str, Tensor]:
        """Loss term -> buffer of ``coefficient / (number of units, :attr:`LossTerm.per`, in the batch)``, float32 0-d.

        The training loop fills the buffers before each step.
        """
        ...

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Loss term -> buffer of its sum over the microbatch, float32 0-d; each forward overwrites the buffer."""
        ...


@runtime_checkable
class HasTallies(Protocol):
    """``model:tallies``: the module counts events in its forward, such as tokens per expert."""

    def tallies(self) -> Mapping[str, Tensor]:
        """Name -> tally buffer, which each forward overwrites with sums over the microbatch.

        Tallies are read before the next forward overwrites them, so a recomputed forward is not counted twice.
        """
        ...


@runtime_checkable
class ObservesOnDemand(Protocol):
    """``model:observes``: the module computes some observations for metrics only if a metric reads them.

    Observations are tensors that metrics read. Here they are further outputs of the model, which the task passes on.
    """

    def on_demand(self) -> Collection[str]:
        """Names of the observations that the module can compute."""
        ...

    def observe(self, name: str, when: Literal["training", "evaluation"]) -> None:
        """From now on, compute an observation in training (or, for ``when="evaluation"``, in ``eval`` mode)."""
        ...


@runtime_checkable
class Adapts(HasTallies, Protocol):
    """``model:adapts``: the module updates its own buffers once per optimizer step, equally on all ranks."""

    def adapts_to(self) -> Collection[str]:
        """Names of the tallies that :meth:`adapt` needs; empty if the module does not adapt."""
        ...

    def adapt(self, tallies: Mapping[str, Tensor], finite: Tensor) -> None:
        """Update the buffers from the tallies of a step, without synchronization.

        Args:
            tallies: name -> tally of :meth:`adapts_to`, summed over all microbatches and all ranks that see other
                samples or other parts of samples.
            finite: 0-d bool; where false, the buffers must not change.
        """
        ...


@runtime_checkable
class LayoutDependent(Protocol):
    """``model:layout_dependent``: the module's results may depend on how a batch is split over ranks."""

    def layout_dependence(self) -> Sequence[str]:
        """Reasons why results depend on the layout, one phrase each; empty if they do not in this configuration."""
        ...


@runtime_checkable
class PipelineStage(Protocol):
    """``model:pipeline``: the module can be built as one of several pipeline stages."""

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Specs of the tensors that this stage passes to the next one, from the microbatch's shapes."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """``model:divisible``: the module has sizes that the ranks of a mesh axis must divide evenly."""

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Mapping from each mesh axis to the sizes that the axis must divide: name of the size -> size."""
        ...


@runtime_checkable
class HasOps(Protocol):
    """``model:ops``: the module calls ops with replaceable backends. Optimizers may have op slots too."""

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of this module (not its children's) or optimizer, by attribute name.

        Slots of an object that the module holds, but that is not a module, have a path: ``dispatcher.permute``.
        """
        ...


@runtime_checkable
class HasAdjacentWeights(Protocol):
    """``model:adjacent_weights``: kernels read some parameters as one matrix if they are adjacent in memory.

    The parameters remain separate: names, gradients and checkpoints do not change. If a strategy shards them, or if
    they are tied or in host memory, they are not placed adjacently.
    """

    def adjacent_weights(self) -> Sequence[Sequence[str]]:
        """Groups of names relative to this module: matrices of one dtype that are equal in all dims but the first."""
        ...


@runtime_checkable
class DefersWeights(Protocol):
    """``model:split_backward``: the module can defer its weight gradients until after its input gradients."""

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """From now on, pass the deferral to the module's ops; ``None`` restores the ordinary backward.

        Returns:
            Names of the module's own parameters whose gradients are deferred; all other gradients are computed at once.
        """
        ...


#: Capability token -> the protocol that at least one module of a stage must implement.
TRAITS: Mapping[str, type] = {
    "model:late_init": LateInit,
    "model:blocks": HasBlocks,
    "model:tensor_parallel": TensorParallelizable,
    "model:context_parallel": ContextParallelizable,
    "model:experts": HasExperts,
    "model:banks": HasBanks,
    "model:losses": AddsLosses,
    "model:tallies": HasTallies,
    "model:observes": ObservesOnDemand,
    "model:adapts": Adapts,
    "model:layout_dependent": LayoutDependent,
    "model:pipeline": PipelineStage,
    "model:ops": HasOps,
    "model:divisible": Divisible,
    "model:adjacent_weights": HasAdjacentWeights,
    "model:split_backward": DefersWeights,
}


def modules_with(stage: nn.Module, trait: type) -> dict[str, Any]:
    """Modules of ``stage`` that implement ``trait``, by qualified name, in registration order."""
    return {name: module for name, module in stage.named_modules() if isinstance(module, trait)}
