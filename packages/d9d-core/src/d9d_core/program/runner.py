"""Contract between the interpreter of programs and the handlers that a schedule's plugin provides."""

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

#: Stage and microbatch.
Key = tuple[int, int]
#: Named tensors that are there, or that are waited for when this is called.
Arrival = Callable[[], Mapping[str, "Tensor"]]


@dataclass
class Visit:
    """One microbatch in one stage, from its forward to its backward.

    Attributes:
        leaves: what came from the previous stage; it collects the gradients that go back there.
        roots: what goes to the next stage, by name, or the loss: where the backward starts.
        dtypes: of the roots' gradients.
    """

    leaves: Mapping[str, Tensor]
    roots: Mapping[str, GradientEdge]
    dtypes: Mapping[str, torch.dtype]


@dataclass
class StepState:
    """State of one step that the handlers of a program's actions share while a runner interprets them.

    Attributes:
        step: 0-based; -1 in a forward that belongs to no training step.
        pack: microbatches on the device.
        scale: term -> 1 / (its weight in the pack); empty in an evaluation.
        visits: microbatches between forward and backward.
        inputs: what a stage needs from the previous one, from its arrival to its use.
        outputs: what a stage made for another rank, until it is sent.
        gradients: those of a stage's outputs, from their arrival to their use.
        input_gradients: those of a stage's inputs, until they are sent to another rank.
        terms: stage -> term -> its share of the mean so far.
        counted: what modules tallied, not yet seen by metrics.
        backwards: how many backwards each stage still has to run.
        split: stage -> the microbatches whose gradients of weights come apart from those of inputs, if it has any.
        weights: what split backwards have left to do.
        ends: called at the end of the step, such as to await what was sent.
        evaluated: takes the outputs of the last stage in an evaluation.
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


#: Runs an action of one type in a step.
Handler = Callable[[Action, StepState], None]


class StageRunner(Protocol):
    """Runner of a program's actions as handlers of further action types see it; the engine's executor implements it.

    Handlers take what :class:`StepState` holds and put into it what the next action needs.
    """

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """Stages of this rank by index."""
        ...

    @property
    def pipeline(self) -> Pipeline:
        """All stages, their ranks, and the programs."""
        ...

    @property
    def topology(self) -> Topology:
        """Process topology."""
        ...

    @property
    def unsplittable(self) -> frozenset[str]:
        """Names of the modules whose backward cannot be split, because it recomputes or was compiled."""
        ...

    def announced(self, stage: int, microbatch: Microbatch) -> Mapping[str, TensorSpec]:
        """Tensors that a stage hands to the next one for this microbatch, in order."""
        ...

    def forward(self, action: Action, state: StepState) -> None:
        """Run a stage on a microbatch."""
        ...

    def backward(self, action: Action, state: StepState) -> None:
        """Compute all gradients of a microbatch in a stage, and hand back those of its inputs."""
        ...

    def open_backward(self, action: MicrobatchAction, state: StepState) -> tuple[Visit, list[Tensor | None]]:
        """Begin a backward of a microbatch in a stage.

        Returns:
            The visit, and the gradient of each of its roots.
        """
        ...

    def close_backward(self, action: MicrobatchAction, visit: Visit, state: StepState) -> None:
        """Hand the gradients of a stage's inputs back to the previous stage."""
        ...

    def after_weights(self, stage: int) -> None:
        """Tell the reducers of a stage that weight gradients which a backward had deferred were added."""
        ...
