"""The interpreter of programs: one handler per action type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from d9d_core.errors import BuildError
from d9d_core.loop.added import AddedLosses, Tallies
from d9d_core.loop.gradients import Gradients
from d9d_core.loop.program import Action, Backward, Forward, Program, Reduce, Schedule, count_stages
from d9d_core.loop.program_check import validate
from d9d_core.loop.statistics import Statistics
from d9d_core.protocols import Microbatch, Pack, Task


@dataclass(frozen=True)
class StageLoss:
    """This rank's share of the mean of each loss term, over the microbatches of one step; 0-d float32 on the device."""

    terms: Mapping[str, Tensor]


@dataclass
class StepState:
    """What the actions of one step share.

    Attributes:
        step: 0-based.
        pack: microbatches on the device.
        scale: term -> 1 / (its weight in the pack).
        pending: microbatch -> loss with its graph, from forward to backward.
        terms: term -> this rank's share of the mean so far.
        backwards: how many backwards each stage still has to run.
    """

    step: int
    pack: Pack
    scale: Mapping[str, Tensor]
    pending: dict[int, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    backwards: Counter[int] = field(default_factory=Counter)


Handler = Callable[[Action, StepState], None]


class Executor:
    """Runs the program of this rank, one action after the other.

    Args:
        stage: the model.
        task: turns microbatches into inputs and outputs into losses.
        added: the loss terms of the model's own modules.
        tallies: what they count.
        gradients: told when a stage's gradients are complete.
        statistics: updated with the task's observations.
        schedule: generates the programs.
        autocast: number format of the forward's matrix products, if not the parameters'.
        device: where the model is.
        draws: number of the step and of the microbatch -> seed of what the microbatch draws.
        handlers: for action types of the schedule's own.
    """

    def __init__(
        self,
        stage: nn.Module,
        task: Task,
        added: AddedLosses,
        tallies: Tallies,
        gradients: Gradients,
        statistics: Statistics,
        schedule: Schedule,
        device: torch.device,
        draws: Callable[[int, int], int],
        autocast: torch.dtype | None = None,
        handlers: Mapping[type[Action], Handler] | None = None,
    ) -> None:
        self.stage = stage
        self._task = task
        self._added = added
        self._tallies = tallies
        self._gradients = gradients
        self._statistics = statistics
        self._coefficients = dict(task.coefficients)
        self._autocast = autocast
        self._device = device
        self._draws = draws
        self._program = cache(lambda microbatches: checked_programs(schedule, 1, microbatches)[0])
        self._handlers: dict[type[Action], Handler] = {
            Forward: self._forward,
            Backward: self._backward,
            Reduce: self._reduce,
            **(handlers or {}),
        }

    def run(self, step: int, pack: Pack, scale: Mapping[str, Tensor]) -> StageLoss:
        """Forward and backward over all microbatches; afterwards parameters hold their gradients.

        Collective over the ranks that share parameters.
        """
        program = self._program(len(pack))
        state = StepState(step, pack, scale)
        self._added.begin(scale)
        state.backwards.update(action.stage for action in program if isinstance(action, Backward))
        for action in program:
            self._handlers[type(action)](action, state)
        return StageLoss(state.terms)

    def _forward(self, action: Action, state: StepState) -> None:
        assert isinstance(action, Forward)
        microbatch = state.pack[action.microbatch]
        torch.manual_seed(self._draws(state.step, action.microbatch))
        outputs = self.forward(microbatch)
        sums = self._task.losses(outputs, microbatch)
        means = {term: sums[term] * state.scale[term] for term in self._coefficients}
        state.pending[action.microbatch] = torch.stack(
            [c * means[term] for term, c in self._coefficients.items()]
        ).sum()
        # The gradients of these are injected where they arise, so they take no part in the backward from here.
        means |= {term: total * state.scale[term] for term, total in self._added.take().items()}
        for term, mean in means.items():
            state.terms[term] = state.terms[term] + mean.detach() if term in state.terms else mean.detach()
        counted = self._tallies.take()
        if self._statistics:
            self._statistics.update({**counted, **self._task.observations(outputs, microbatch)})

    def _backward(self, action: Action, state: StepState) -> None:
        assert isinstance(action, Backward)
        state.backwards[action.stage] -= 1
        self._gradients.before_backward(last=state.backwards[action.stage] == 0)
        state.pending.pop(action.microbatch).backward()  # type: ignore[no-untyped-call]

    def _reduce(self, action: Action, _state: StepState) -> None:
        self._gradients.reduce(action.stage)

    def forward(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """The model's outputs for one microbatch, in the job's number format."""
        inputs = self._task.inputs(microbatch)
        enabled = self._autocast is not None
        with torch.autocast(self._device.type, self._autocast) if enabled else nullcontext():
            outputs: Mapping[str, Tensor] = self.stage(**inputs.first, **inputs.shared)
        return outputs


def checked_programs(schedule: Schedule, ranks: int, microbatches: int) -> Sequence[Program]:
    """The programs of all pipeline ranks, validated.

    Raises:
        BuildError: the schedule cannot do that, or generates an invalid program.
    """
    try:
        programs = schedule(ranks, microbatches)
    except ValueError as error:
        raise BuildError(f"pipeline: {error}") from error
    problems = validate(programs, count_stages(programs), microbatches)
    if len(programs) != ranks:
        problems = [f"{len(programs)} programs for {ranks} rank(s); a schedule makes one for each"]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        text = f"pipeline: invalid program for {microbatches} microbatch(es): {'; '.join(problems[:5])}{more}"
        raise BuildError(f"{text}. The schedule is wrong, not the job: choose another, or repair its plugin")
    return programs
