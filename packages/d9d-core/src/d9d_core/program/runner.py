"""Interface between the interpreter of programs and the handlers of a schedule's plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from d9d_core.program.placement import Pipeline
from d9d_core.schedule import Action, MicrobatchAction
from d9d_core.topology import Topology
from d9d_core.types import Microbatch, Pack, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.autograd.graph import GradientEdge

__all__ = ["Arrival", "Handler", "StageRunner", "StepState", "Visit"]

#: Index of a stage, and index of a microbatch.
Key = tuple[int, int]
#: Function that waits for named tensors, if necessary, and returns them.
Arrival = Callable[[], Mapping[str, "Tensor"]]


@dataclass
class Visit:
    """State of one microbatch in one stage, from its forward to its backward.

    Attributes:
        leaves: inputs from the previous stage; their gradients are sent back to it.
        roots: graph edges of the stage's outputs or the loss, by name, at which the backward starts.
        dtypes: dtypes of the roots' gradients.
    """

    leaves: Mapping[str, Tensor]
    roots: Mapping[str, GradientEdge]
    dtypes: Mapping[str, torch.dtype]


@dataclass
class StepState:
    """State of one step, shared by the handlers of a program's actions.

    Attributes:
        step: step number, 0-based; -1 in a forward outside of training steps.
        pack: microbatches on the device.
        scale: loss term -> 1 / (its weight over all microbatches and all ranks of the step); empty in an evaluation.
        visits: (stage, microbatch) -> its state between forward and backward.
        inputs: (stage, microbatch) -> inputs from the previous stage, from their arrival to their use.
        outputs: (stage, microbatch) -> outputs for a stage on another rank, until they are sent.
        gradients: (stage, microbatch) -> gradients of the stage's outputs, from their arrival to their use.
        input_gradients: (stage, microbatch) -> gradients of the stage's inputs, until they are sent to another rank.
        terms: stage -> loss term -> its sum over the microbatches so far, multiplied by ``scale``.
        counted: tallies, counted by modules in a forward, that metrics have not read yet.
        backwards: stage -> number of its remaining backwards.
        split: stage -> microbatches whose backward is split into input and weight gradients.
        weights: (stage, microbatch) -> function that computes the weight gradients of a split backward.
        ends: functions to call at the end of the step, for example to wait for sends.
        evaluated: function that receives the last stage's outputs in an evaluation.
    """

    step: int
    pack: Pack
    scale: Mapping[str, Tensor]
    visits: dict[Key, Visit] = field(default_factory=dict)
    inputs: dict[Key, Arrival] = field(default_factory=dict)
    outputs: dict[Key, Mapping[str, Tensor]] = field(default_factory=dict)
    gradients: dict[Key, Arrival] = field(default_factory=dict)
    input_gradients: dict[Key, Mapping[str, Tensor]] = field(default_factory=dict)
    terms: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    counted: list[Mapping[str, Tensor]] = field(default_factory=list)
    backwards: Counter[int] = field(default_factory=Counter)
    split: Mapping[int, frozenset[int]] = field(default_factory=dict)
    weights: dict[Key, Callable[[], None]] = field(default_factory=dict)
    ends: list[Callable[[], None]] = field(default_factory=list)
    evaluated: Callable[[Mapping[str, Tensor], Microbatch], None] | None = None


#: Function that runs an action of one type in a step.
Handler = Callable[[Action, StepState], None]


class StageRunner(Protocol):
    """Interface of the engine's executor for the handlers of action types that plugins add.

    Handlers read their inputs from :class:`StepState` and store the inputs of later actions there.
    """

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """Stages of this rank by index."""
        ...

    @property
    def pipeline(self) -> Pipeline:
        """Placement of all stages, and the programs."""
        ...

    @property
    def topology(self) -> Topology:
        """Topology of this process: coordinates, device, meshes and process groups."""
        ...

    @property
    def unsplittable(self) -> frozenset[str]:
        """Names of the modules whose backward cannot be split, because they are recomputed or compiled."""
        ...

    def announced(self, stage: int, microbatch: Microbatch) -> Mapping[str, TensorSpec]:
        """Specs of the tensors that a stage passes to the next one for a microbatch, in order."""
        ...

    def forward(self, action: Action, state: StepState) -> None:
        """Run a stage on a microbatch."""
        ...

    def backward(self, action: Action, state: StepState) -> None:
        """Compute all gradients of a microbatch in a stage, and pass on the gradients of its inputs."""
        ...

    def open_backward(self, action: MicrobatchAction, state: StepState) -> tuple[Visit, list[Tensor | None]]:
        """Begin a backward: find the state of a microbatch in a stage and the gradients to propagate.

        Returns:
            State of the microbatch, and the gradient of each of its roots.
        """
        ...

    def close_backward(self, action: MicrobatchAction, visit: Visit, state: StepState) -> None:
        """End a backward: pass the gradients of the stage's inputs to the previous stage."""
        ...

    def after_weights(self, stage: int) -> None:
        """Notify a stage's gradient reducers: a microbatch's deferred weight gradients were added to the gradients."""
        ...
