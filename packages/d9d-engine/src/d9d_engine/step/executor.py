"""Executor of pipeline programs, with one handler per action type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from d9d_core.errors import BuildError
from d9d_core.program.placement import Pipeline
from d9d_core.program.runner import Handler, StageRunner, StepState, Visit
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Program,
    Reduce,
    compute_parts,
)
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, Pack, TensorSpec
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.ranges import Ranges, name_of
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.checked_task import LossTask
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.randomness import seed_generators

Outputs = Callable[[Mapping[str, Tensor], Microbatch], None]
#: Step number of a forward outside of a step.
_NO_STEP = -1


@dataclass(frozen=True)
class StageLoss:
    """Loss of a step on this rank, 0-d float32.

    Attributes:
        terms: loss term -> this rank's share of its mean over the microbatches; a sum if the task weighs outputs.
        weight: weight of this rank's outputs if the task weighs outputs; ``None`` on ranks without the last stage.
    """

    terms: Mapping[str, Tensor]
    weight: Tensor | None = None


class Executor:
    """Runs this rank's program, one action after the other.

    Handlers of further action types, such as sends and receives, get the executor as a
    :class:`~d9d_core.program.runner.StageRunner`, and may replace the handlers defined here.

    Args:
        stages: index -> stage of this rank.
        pipeline: all stages, and the programs.
        boundaries: boundary tensors between stages.
        topology: rank, device, meshes and process groups of this process.
        task: makes model inputs from microbatches, and losses from outputs.
        auxiliary_losses: loss terms of the model's modules.
        tallies: counts of the model's modules.
        gradients: notified when a stage's gradients are complete.
        statistics: updated with the task's observations.
        draws: (step, microbatch, stage) -> seed of random numbers in the forward.
        autocast: autocast dtype of the forward; ``None`` disables autocast.
        unsplittable: names of the modules whose backward cannot be split.
        handlers: makes the schedule's own handlers.
        inputs: makes the model's keyword arguments for a microbatch; by default the task does.
        ranges: profiler ranges around the actions.

    Raises:
        BuildError: the schedule has actions without a handler.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        pipeline: Pipeline,
        boundaries: Boundaries,
        topology: Topology,
        task: LossTask,
        auxiliary_losses: AuxiliaryLosses,
        tallies: Tallies,
        gradients: Gradients,
        statistics: Statistics,
        draws: Callable[[int, int, int], int],
        autocast: torch.dtype | None = None,
        unsplittable: frozenset[str] = frozenset(),
        handlers: Callable[[StageRunner], Mapping[type[Action], Handler]] | None = None,
        inputs: Callable[[Microbatch], StageInputs] | None = None,
        ranges: Ranges | None = None,
    ) -> None:
        self.stages = stages
        self.pipeline = pipeline
        self._boundaries = boundaries
        self.topology = topology
        self._gradients = gradients
        self.unsplittable = unsplittable
        self._last = len(pipeline.hosts) - 1
        self._position = topology.coordinate["pp"]
        self._task = task
        self._numbers: Sequence[int] = ()  # indices in the whole pack of the microbatches that run
        self._weight: Tensor | None = None  # sum of the output weights of this step, if the task weighs outputs
        self._inputs = inputs
        self._ranges = ranges or Ranges()
        self._auxiliary = auxiliary_losses
        self._tallies = tallies
        self._statistics = statistics
        self._coefficients = dict(task.coefficients)
        self._autocast = autocast
        self._draws = draws
        self._program = cache(self._overview)
        self._handlers: dict[type[Action], Handler] = {
            Forward: self.forward,
            Backward: self.backward,
            Reduce: self._reduce,
            **(handlers(self) if handlers else {}),
        }
        if unknown := sorted(kind.__name__ for kind in pipeline.kinds - self._handlers.keys()):
            raise BuildError(
                f"pipeline: the schedule has actions without a handler: {', '.join(unknown)}; add them to 'handlers'"
            )

    def run(self, step: int, pack: Pack, scale: Mapping[str, Tensor], share: Sequence[int] | None = None) -> StageLoss:
        """Run forward and backward over microbatches; afterwards parameters hold their gradients.

        Collective over the ranks that share parameters, and over the pipeline ranks.

        Args:
            step: step number, 0-based.
            pack: microbatches on the device.
            scale: loss term -> factor of its sums.
            share: indices of the microbatches to run, if elastic replicas run the other microbatches; by default all.
        """
        self._numbers = range(len(pack)) if share is None else share
        pack = [pack[index] for index in self._numbers]
        if not pack:
            for stage in self.stages:
                self._gradients.reduce(stage)  # this replica has no gradients; they count as zeros
            return StageLoss({})
        program, backwards, split = self._program(len(pack))
        state = StepState(step, pack, scale, backwards=Counter(backwards), split=split)
        self._weight = None
        self._auxiliary.begin(scale)
        self._interpret(program, state)
        for counted in state.counted:
            self._statistics.tally(counted)
        terms: dict[str, Tensor] = {}
        for of_stage in state.terms.values():
            terms |= {term: terms[term] + mean if term in terms else mean for term, mean in of_stage.items()}
        return StageLoss(terms, self._weight)

    def evaluate(self, pack: Pack, outputs: Outputs, step: int | None = None) -> None:
        """Run forward over all microbatches, without gradients.

        Collective over the ranks of the pipeline.

        Args:
            pack: microbatches on the device.
            outputs: called with the model's outputs and the microbatch, on the ranks that have the last stage.
            step: training step whose random numbers are drawn; by default the generators continue.
        """
        self._numbers = range(len(pack))
        state = StepState(_NO_STEP if step is None else step, pack, {}, evaluated=outputs)
        with torch.no_grad():
            self._interpret(self.pipeline.forward_program(self._position, len(pack)), state)

    def _overview(self, microbatches: int) -> tuple[Program, Counter[int], Mapping[int, frozenset[int]]]:
        """This rank's program, the number of backwards of each stage, and the microbatches whose backward is split."""
        program = self.pipeline.program(self._position, microbatches)
        parts = [part for action in program for part in compute_parts(action)]
        backwards = Counter(part.stage for part in parts if isinstance(part, Backward | InputBackward))
        split: dict[int, frozenset[int]] = {}
        for part in parts:
            if isinstance(part, InputBackward):
                split[part.stage] = split.get(part.stage, frozenset()) | {part.microbatch}
        return program, backwards, split

    def _interpret(self, program: Program, state: StepState) -> None:
        if self._ranges.on:
            for action in program:
                with self._ranges(name_of(action)):
                    self._handlers[type(action)](action, state)
        else:
            for action in program:
                self._handlers[type(action)](action, state)
        for end in state.ends:
            end()

    def forward(self, action: Action, state: StepState) -> None:
        """Run a stage on a microbatch; the last stage computes the loss, other stages pass on their outputs."""
        assert isinstance(action, Forward)
        stage, microbatch = action.stage, state.pack[action.microbatch]
        leaves = self._leaves(action, state)
        if state.step != _NO_STEP:
            seed_generators(self.topology.device, self._draws(state.step, self._numbers[action.microbatch], stage))
        outputs = self._call(stage, microbatch, leaves)
        if stage < self._last:
            outputs = self._boundaries.conform(stage, outputs, microbatch)
            self._hand_on(action, {name: tensor.detach() for name, tensor in outputs.items()}, state)
            roots = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        elif state.evaluated is not None:
            state.evaluated(outputs, microbatch)
            return
        else:
            roots = {"loss": self._loss(outputs, microbatch, state)}
        if state.evaluated is None:
            self._observe(stage, outputs, microbatch, state)
            # Keep gradient edges instead of outputs, so that sent tensors are freed: the graph does not need them.
            edges = {name: get_gradient_edge(tensor) for name, tensor in roots.items()}
            dtypes = {name: tensor.dtype for name, tensor in roots.items()}
            state.visits[stage, action.microbatch] = Visit(leaves, edges, dtypes)

    def backward(self, action: Action, state: StepState) -> None:
        """Compute all gradients of a microbatch in a stage, and pass input gradients to the previous stage."""
        assert isinstance(action, Backward)
        visit, gradients = self.open_backward(action, state)
        if visit.roots:
            torch.autograd.backward(list(visit.roots.values()), gradients)
        self.close_backward(action, visit, state)

    def open_backward(self, action: MicrobatchAction, state: StepState) -> tuple[Visit, list[Tensor | None]]:
        """Begin the backward of a microbatch; return its state, and the gradient of each tensor it starts from."""
        stage, microbatch = key = (action.stage, action.microbatch)
        visit = state.visits.pop(key)
        state.backwards[stage] -= 1
        split = stage in state.split
        self._gradients.before_backward(last=state.backwards[stage] == 0 and not split, stage=stage, complete=not split)
        if stage == self._last:
            return visit, [None]
        arrived = state.gradients.pop((stage, microbatch))()
        return visit, [arrived[name].to(dtype) for name, dtype in visit.dtypes.items()]

    def close_backward(self, action: MicrobatchAction, visit: Visit, state: StepState) -> None:
        """Pass the gradients of a stage's inputs to the previous stage."""
        if action.stage == 0:
            return
        back: dict[str, Tensor] = {}
        for name, leaf in visit.leaves.items():
            if leaf.is_floating_point():
                back[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        key = (action.stage - 1, action.microbatch)
        if self._is_here(action.stage - 1):
            state.gradients[key] = lambda: back
        else:
            state.input_gradients[action.stage, action.microbatch] = back

    def announced(self, stage: int, microbatch: Microbatch) -> Mapping[str, TensorSpec]:
        """Specifications of the tensors that a stage passes to the next one for this microbatch, in order."""
        return self._boundaries.after(stage, microbatch)

    def after_weights(self, stage: int) -> None:
        """Tell a stage's gradient reducers that a microbatch's deferred weight gradients were added."""
        self._gradients.after_weights(stage)

    def _is_here(self, stage: int) -> bool:
        """Whether this rank runs a stage."""
        return stage in self.stages

    def _reduce(self, action: Action, _state: StepState) -> None:
        self._gradients.reduce(action.stage)

    def _leaves(self, action: Forward, state: StepState) -> dict[str, Tensor]:
        if action.stage == 0:
            return {}
        arrived = state.inputs.pop((action.stage, action.microbatch))()
        leaves = {name: tensor.detach() for name, tensor in arrived.items()}
        for leaf in leaves.values():
            leaf.requires_grad_(torch.is_grad_enabled() and leaf.is_floating_point())
        return leaves

    def _call(self, stage: int, microbatch: Microbatch, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # Look up the task's method each time: CheckedTask replaces its methods after their first call.
        inputs = self._inputs(microbatch) if self._inputs else self._task.inputs(microbatch)
        kept = inputs.kept if stage == self._last else {}
        own = inputs.first if stage == 0 else leaves
        if both := own.keys() & inputs.shared.keys():
            source = "the task's first inputs" if stage == 0 else "the previous stage"
            raise BuildError(
                f"stage {stage} gets the input {', '.join(sorted(both))} twice, from {source} and from the task's "
                "shared "
                "inputs; rename one of the two"
            )
        enabled = self._autocast is not None
        with torch.autocast(self.topology.device.type, self._autocast) if enabled else nullcontext():
            outputs: Mapping[str, Tensor] = self.stages[stage](**own, **inputs.shared)
        if both := kept.keys() & outputs.keys():
            names = ", ".join(sorted(both))
            raise BuildError(
                f"the task's kept inputs and the model's outputs both have the name {names}; rename one of them"
            )
        return {**outputs, **kept} if kept else outputs

    def _hand_on(self, action: Forward, outputs: Mapping[str, Tensor], state: StepState) -> None:
        if self._is_here(action.stage + 1):
            state.inputs[action.stage + 1, action.microbatch] = lambda: outputs
        else:
            state.outputs[action.stage, action.microbatch] = outputs

    def _loss(self, outputs: Mapping[str, Tensor], microbatch: Microbatch, state: StepState) -> Tensor:
        sums = self._task.losses(outputs, microbatch)
        means = {term: sums[term] * state.scale[term] for term in self._coefficients}
        self._count(self._last, means, state)
        if self._task.late:
            (weight,) = self._task.weigh(outputs, microbatch).values()
            self._weight = weight.detach() if self._weight is None else self._weight + weight.detach()
        return torch.stack([c * means[term] for term, c in self._coefficients.items()]).sum()

    def _observe(self, stage: int, outputs: Mapping[str, Tensor], microbatch: Microbatch, state: StepState) -> None:
        # Modules inject the gradients of auxiliary losses themselves, so these sums are not part of the backward.
        self._count(
            stage, {term: sum_ * state.scale[term] for term, sum_ in self._auxiliary.take(stage).items()}, state
        )
        counted = self._tallies.take(stage)
        if stage == self._last and self._statistics:
            self._statistics.update(self._task.observations(outputs, microbatch))
        if counted and self._statistics.tallied:
            # The next forward of the stage overwrites the tallies.
            state.counted.append({name: tensor.clone() for name, tensor in counted.items()})

    @staticmethod
    def _count(stage: int, means: Mapping[str, Tensor], state: StepState) -> None:
        terms = state.terms.setdefault(stage, {})
        for term, mean in means.items():
            terms[term] = terms[term] + mean.detach() if term in terms else mean.detach()
