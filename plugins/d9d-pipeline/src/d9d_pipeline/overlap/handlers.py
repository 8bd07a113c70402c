"""Handlers of actions for a schedule with overlapped pairs (a forward and a backward at the same time)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from d9d_core.program.runner import Arrival, Handler, StageRunner, StepState
from d9d_core.schedule import Action, Backward, Forward, InputBackward, MicrobatchAction, Overlap
from torch import Tensor

from d9d_pipeline.overlap.pair_runner import PairRunner
from d9d_pipeline.overlap.streams import StageStreams


def overlap_handlers(runner: StageRunner, handlers: Mapping[type[Action], Handler]) -> dict[type[Action], Handler]:
    """Handlers that run each stage on its own stream, and overlapped pairs at the same time.

    Args:
        runner: interpreter of the stages, which are changed in place, see :class:`PairRunner`.
        handlers: handlers of all other actions.
    """
    pairs = OverlapHandlers(runner, handlers)
    found: dict[type[Action], Handler] = dict.fromkeys(handlers, pairs.on_stream)
    return found | {Overlap: pairs.overlap}


class OverlapHandlers:
    """Handlers of actions on the streams of their stages, and of overlapped pairs.

    Args:
        runner: interpreter of the stages.
        handlers: handlers of all actions except pairs.
    """

    def __init__(self, runner: StageRunner, handlers: Mapping[type[Action], Handler]) -> None:
        device = runner.topology.device
        self._runner = runner
        self._handlers = handlers
        self._streams = StageStreams(device, runner.stages)
        self._pair_runner = PairRunner(runner.stages, device)

    def on_stream(self, action: Action, state: StepState) -> None:
        """Run one action (except a pair) on the CUDA stream of its stage."""
        if self._streams.join not in state.ends:
            self._streams.fork()
            state.ends.append(self._streams.join)
        with self._streams.on(action.stage):
            self._handlers[type(action)](action, state)
        # If the next stage to use the result is on this rank, it reads the result on another stream.
        if isinstance(action, Forward):
            self._cross(state.inputs, action, action.stage + 1)
        elif isinstance(action, Backward | InputBackward):
            self._cross(state.gradients, action, action.stage - 1)

    def overlap(self, action: Action, state: StepState) -> None:
        """Run the forward and the backward of an overlapped pair at the same time."""
        assert isinstance(action, Overlap)
        forward, backward = action.forward, action.backward
        self._pair_runner.run(partial(self.on_stream, forward, state), partial(self.on_stream, backward, state))

    def _cross(self, arrivals: dict[tuple[int, int], Arrival], action: MicrobatchAction, target: int) -> None:
        key = (target, action.microbatch)
        if target in self._runner.stages and key in arrivals:
            arrivals[key] = partial(self._handed, arrivals[key], action.stage, target, self._streams.mark(action.stage))

    def _handed(
        self, arrival: Arrival, source: int, target: int, made: torch.cuda.Event | None
    ) -> Mapping[str, Tensor]:
        tensors = arrival()
        self._streams.handoff(tensors.values(), source, target, made)
        return tensors
