"""Traits: small protocols by which a model's modules describe themselves to strategies and to the loop.

Start here: :class:`LateInit`, which every module with parameters needs, and :class:`HasBlocks`, the repeated blocks
that most strategies act on::

    from torch import nn

    class Backbone(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(layers)})

        def blocks(self):
            return {f"layers.{name}": layer for name, layer in self.layers.items()}

A strategy walks the modules of a stage and asks for the trait it needs. ``ModelSpec.provides`` states the same as
tokens (``model:blocks``), so that a missing trait is an error before anything is built; the model conformance suite
checks that both agree.
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
    "Divisible", "HasAdjacentWeights", "HasBanks", "HasBlocks", "HasExperts", "HasOps", "HasTallies", "LateInit",
    "LayoutDependent", "LossTerm", "ObservesOnDemand", "PipelineStage", "Routing", "TensorParallelizable",
    "TensorStyle", "Transfer", "modules_with",
]  # fmt: skip

T_co = TypeVar("T_co", covariant=True)


class TensorStyle(StrEnum):
    """Style in which a child module may be split over the ranks of ``tp``."""

    COLUMN = "column"  # weight [out, in] split over out; output features are split
    ROW = "row"  # weight [out, in] split over in; input features are split, output is a partial sum
    VOCAB = "vocab"  # weight [vocabulary, features] split over the vocabulary
    SEQUENCE = "sequence"  # weight replicated, tokens split over the sequence; weight gradients are partial sums
    PARTIAL = "partial"  # weight replicated, applied to a rank's own heads; weight gradients are partial sums
    WHOLE = "whole"  # weight replicated, the whole sequence on every rank, which all compute the same


@dataclass(frozen=True, slots=True)
class LossTerm:
    """Loss term that a module adds to a step: ``coefficient * (its sum over the batch) / (global weight)``.

    Attributes:
        coefficient: factor of the term in the total.
        per: what the sum is over and the mean is of: ``sample``, or ``position`` of a sample. Where the task's inputs
            have ``lengths`` (:mod:`d9d_core.data`), positions beyond them and samples of length zero do not count.
    """

    coefficient: float
    per: Literal["sample", "position"]


@runtime_checkable
class LateInit(Protocol):
    """``model:late_init``: the module owns parameters or buffers and can fill them after materialisation."""

    def reset_parameters(self) -> None:
        """Fill this module's own parameters and buffers (not its children's), with torch's default generator."""
        ...


@runtime_checkable
class HasBlocks(Protocol):
    """``model:blocks``: the module is mostly a chain of alike blocks."""

    def blocks(self) -> Mapping[str, nn.Module]:
        """Blocks in order of execution, keyed by their name relative to this module."""
        ...


@runtime_checkable
class TensorParallelizable(Protocol):
    """``model:tensor_parallel``: the module says how its children may be split over ``tp``.

    Between the modules of a stage, positions are split: each rank holds S / tp of them. A module with children of style
    ``COLUMN`` gets all positions in its first argument; its ``ROW`` children return a rank's own positions again. So do
    embeddings of style ``VOCAB``, which get all tokens; other modules of style ``VOCAB``, and those of style ``WHOLE``,
    get all positions in their first argument and return whatever they return. Every parameter of the stage belongs to a
    child with a style. What else modules may say is in :mod:`d9d_core.model`.
    """

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the children, keyed by their name relative to this module."""
        ...


@runtime_checkable
class ContextParallelizable(Protocol):
    """``model:context_parallel``: the module knows where tokens of one sequence look at each other."""

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """Attention cores, which get queries, keys and values, keyed by relative name."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """``model:experts``: the module sends each token to some of its experts.

    Attributes:
        dispatcher: brings tokens to the experts and back; replaced by a strategy that spreads experts over ranks.
    """

    dispatcher: Dispatcher

    def expert_banks(self) -> Mapping[str, nn.Module]:
        """Expert banks, keyed by relative name: modules of whose parameters dimension 0 is the expert."""
        ...


class Routing(Protocol):
    """Protocol, beside the trait of experts, of a routing: T tokens, E experts, k experts of a token."""

    @property
    def indices(self) -> Tensor:
        """Experts of each token, int64 [T, k]; E, one past the last expert, stands for none, with a weight of zero."""
        ...

    @property
    def weights(self) -> Tensor:
        """Factors of the experts in a token's output, [T, k]; float32 or wider."""
        ...

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, int64 [E], on the device of the indices."""
        ...

    @property
    def limit(self) -> int | None:
        """Most rows of any expert, known from shapes alone; ``None`` if nothing limits them."""
        ...

    @property
    def incomplete(self) -> bool:
        """Whether some indices may stand for none, as those of padding do; known without waiting for the device."""
        ...


class Dispatched(NamedTuple):
    """Tokens dispatched to the experts of this rank: R rows of H features.

    Attributes:
        tokens: [R, H], sorted by expert.
        counts: int64 [experts of this rank], rows of each expert, on the device of the tokens.
        spare_rows: whether there may be more rows than counts add up to. Those belong to no token.
        handle: what :meth:`Dispatcher.combine` of the same dispatcher needs.
    """

    tokens: Tensor
    counts: Tensor
    spare_rows: bool
    handle: Any


class Transfer(Protocol[T_co]):
    """Communication in flight. What is computed between its start and :meth:`wait` overlaps with it."""

    def wait(self) -> T_co:
        """Wait for the result, once. Later work on the device comes after the arrival."""
        ...


class Dispatcher(Protocol):
    """Protocol, beside the trait of experts, of a dispatcher: dispatch of tokens, and combine of the experts' outputs.

    Gradients take the same way back.

    A dispatcher that reaches other ranks has their process group as attribute ``group``: so a schedule that overlaps a
    forward with a backward knows that there is communication to hide.

    One whose communication no compiler can trace may have a method ``outside_graph(function, *args)``, which calls the
    function. A layer calls by it all from dispatch to combine: one graph ends there and one begins, in place of some
    for every piece in between.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> Transfer[Dispatched]:
        """Start the dispatch of tokens [T, H] to their experts. Collective over the ranks that share the experts."""
        ...

    def combine(self, outputs: Tensor, handle: Any) -> Transfer[Tensor]:
        """Start the combine of outputs [R, H], in the order of dispatch, to [T, H]: sums weighted by the routing.

        Collective over the ranks that share the experts. Sums are computed in float32 or wider. They are rounded to
        the dtype of the outputs where they leave a rank, and once at the end.
        """
        ...


@runtime_checkable
class HasBanks(Protocol):
    """``model:banks``: the module multiplies rows with banks of matrices, one matrix for each expert.

    A fine-tuning method adds a term to a product: a module that is called with the same rows, counts and ``spare_rows``
    as the product, and whose result is added to it. Of the term's parameters, too, dimension 0 is the expert.
    """

    def banks(self) -> Mapping[str, nn.Parameter]:
        """Banks by their name relative to this module, each [experts, features in, features out]."""
        ...

    def bank_terms(self) -> nn.ModuleDict:
        """Terms by the name of their bank; empty until a method adds some."""
        ...


@runtime_checkable
class AddsLosses(Protocol):
    """``model:losses``: the module adds terms of its own to the task's loss.

    Its forward leaves the sum of each term over the microbatch, and injects the gradient of ``sum * factor`` where its
    output passes (:func:`d9d_nn.auxiliary_loss.add_auxiliary_loss`). So a term needs no way through the model's outputs
    and pipeline stages. Weights follow from shapes alone: factors are known before the first forward.
    """

    def loss_terms(self) -> Mapping[str, LossTerm]:
        """Loss terms of the module. Modules may share one: their sums add up, and they must agree about it."""
        ...

    def loss_factors(self) -> Mapping[str, Tensor]:
        """Factor buffers by term: float32 0-d, ``coefficient / (global weight)``; filled before each step."""
        ...

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Sum buffers by term: float32 0-d, which each forward overwrites with its sum over the microbatch."""
        ...


@runtime_checkable
class HasTallies(Protocol):
    """``model:tallies``: the module counts what happens in its forward."""

    def tallies(self) -> Mapping[str, Tensor]:
        """Tally buffers by name, which each forward overwrites with sums over the microbatch.

        Overwrites: what a forward leaves is taken before the next one, so a recomputation counts nothing twice.
        """
        ...


@runtime_checkable
class ObservesOnDemand(Protocol):
    """``model:observes``: the module computes some observations for metrics only if a metric reads them.

    They are further outputs of the model, which the task hands on if they are there.
    """

    def on_demand(self) -> Collection[str]:
        """Names of the observations that it can compute."""
        ...

    def observe(self, name: str, when: Literal["training", "evaluation"]) -> None:
        """Compute one of them from now on: in training, or in forwards of a module in ``eval`` mode."""
        ...


@runtime_checkable
class Adapts(HasTallies, Protocol):
    """``model:adapts``: the module changes buffers of its own once per optimizer step, in the same way on all ranks."""

    def adapts_to(self) -> Collection[str]:
        """Names of the tallies that :meth:`adapt` needs, summed over ranks. None: the module stays as it is."""
        ...

    def adapt(self, tallies: Mapping[str, Tensor], finite: Tensor) -> None:
        """Update the buffers from the tallies of a step, without waiting for the device.

        Args:
            tallies: those of :meth:`adapts_to`, summed over all microbatches and all ranks that see other samples, or
                other parts of them.
            finite: 0-d bool; where it is false, nothing may change.
        """
        ...


@runtime_checkable
class LayoutDependent(Protocol):
    """``model:layout_dependent``: the module may compute what depends on how a batch is cut; ``d9d verify`` says so."""

    def layout_dependence(self) -> Sequence[str]:
        """Differences between layouts, one phrase each; empty if, as configured, there are none."""
        ...


@runtime_checkable
class PipelineStage(Protocol):
    """``model:pipeline``: the module can be built as one of several stages."""

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Specifications of the tensors that this stage hands to the next one, from the microbatch's shapes."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """``model:divisible``: the module has sizes that the ranks of a mesh axis must share evenly."""

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Sizes to divide: mesh axis -> name of the size -> size."""
        ...


@runtime_checkable
class HasOps(Protocol):
    """``model:ops``: the module calls ops whose backend may be chosen. An optimizer may, too, for instance its step."""

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of this module (not its children's) or optimizer, keyed by attribute.

        That of an object which the module holds, and which is no module itself, has a path: ``dispatcher.permute``.
        """
        ...


@runtime_checkable
class HasAdjacentWeights(Protocol):
    """``model:adjacent_weights``: kernels read some parameters as one, if they follow each other in memory.

    They are parameters of their own all the same: names, gradients and checkpoints stay as they are. Where a strategy
    shards them, or they are tied or on the host, each has memory of its own.
    """

    def adjacent_weights(self) -> Sequence[Sequence[str]]:
        """Groups of names relative to this module: matrices of one dtype, alike in all dims but the first."""
        ...


@runtime_checkable
class DefersWeights(Protocol):
    """``model:split_backward``: the module can defer its weight gradients to a time after those of its inputs."""

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Hand the deferral to the ops from now on; ``None``: compute everything in the backward again.

        Returns:
            Names of the module's own parameters whose gradients are left to it. Those of the others come at once.
        """
        ...


#: capability token -> the protocol that at least one module of a stage must implement.
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
