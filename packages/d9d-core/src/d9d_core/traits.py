"""What a model tells the framework about itself, by implementing small protocols next to its forward.

A strategy walks the modules of a stage and asks for the trait it needs. ``ModelSpec.provides`` states the same as
tokens (``model:blocks``), so that a missing trait is an error before anything is built; the model conformance suite
checks that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from d9d_core.ops import OpSlot


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorStyle(StrEnum):
    """How a child module may be split over the ranks of ``tp``."""

    COLUMN = "column"  # weight [out, in] split over out; output features are split
    ROW = "row"  # weight [out, in] split over in; input features are split, output is a partial sum
    VOCAB = "vocab"  # weight [vocabulary, features] split over the vocabulary
    SEQUENCE = "sequence"  # weight replicated, tokens split over the sequence; weight gradients are partial sums


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
        """The blocks in order of execution, keyed by their name relative to this module."""
        ...


@runtime_checkable
class TensorParallelizable(Protocol):
    """``model:tensor_parallel``: the module says how its children may be split over ``tp``."""

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Child name relative to this module -> style."""
        ...


@runtime_checkable
class ContextParallelizable(Protocol):
    """``model:context_parallel``: the module knows where tokens of one sequence look at each other."""

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """The modules that compute attention from queries, keys and values, keyed by relative name."""
        ...


@runtime_checkable
class PipelineStage(Protocol):
    """``model:pipeline``: the module can be built as one of several stages."""

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """What this stage hands to the next one, from the shapes of a microbatch alone."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """``model:divisible``: the module has sizes that the ranks of a mesh axis must share evenly."""

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Mesh axis -> what there is -> how many of it."""
        ...


@runtime_checkable
class HasOps(Protocol):
    """``model:ops``: the module calls ops whose backend may be chosen."""

    def op_slots(self) -> Mapping[str, OpSlot]:
        """The slots of this module (not its children's), keyed by attribute name."""
        ...


#: capability token -> the protocol that at least one module of a stage must implement.
TRAITS: Mapping[str, type] = {
    "model:late_init": LateInit,
    "model:blocks": HasBlocks,
    "model:tensor_parallel": TensorParallelizable,
    "model:context_parallel": ContextParallelizable,
    "model:pipeline": PipelineStage,
    "model:ops": HasOps,
    "model:divisible": Divisible,
}


def modules_with(stage: nn.Module, trait: type) -> dict[str, Any]:
    """The modules of ``stage`` that implement ``trait``, by qualified name, in registration order."""
    return {name: module for name, module in stage.named_modules() if isinstance(module, trait)}
