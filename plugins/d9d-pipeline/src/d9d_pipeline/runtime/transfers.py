"""Transfers of activations and gradients between pipeline ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from d9d_core.errors import BuildError
from d9d_core.program.runner import Arrival, Handler, StageRunner, StepState
from d9d_core.schedule import (
    Action,
    MicrobatchAction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from d9d_core.types import TensorSpec
from torch import Tensor
from torch import distributed as dist

from d9d_pipeline.schedule.insert_transfers import just_in_time

#: Number of thread blocks of a transfer's kernel. They occupy multiprocessors while the kernel waits for the other
#: rank, which can slow down matrix products considerably; but few blocks use only part of the link's bandwidth.
_BLOCKS = 8


class Transfers:
    """Transfers between stages: handlers of sends and receives, awaited where the tensors are needed.

    Each direction, to higher ranks and to lower ranks, has its own process group, and on GPUs each pair of ranks its
    own communicator and stream: neither direction waits for the other, nor for the model's collectives. Within a
    direction, tensors arrive in the order of sending; the programs of both ranks keep that order.

    A send keeps its tensor until the tensor is sent. A receive allocates tensors of the boundary's shapes, and the
    consumer waits for them: on GPUs the current stream waits, not the host. A receive whose tensor is expected to
    arrive late is posted just before the tensor is needed, not at its position in the program, because a posted NCCL
    receive occupies SMs while it waits.

    Args:
        runner: interpreter of the stages, with their boundaries. Collective over the ranks along ``pp``.
    """

    def __init__(self, runner: StageRunner) -> None:
        topology = runner.topology
        self._runner = runner
        self._place = topology.coordinate["pp"]
        groups = [topology.axes_group("pp", purpose=f"pipeline {way}", blocks=_BLOCKS) for way in ("up", "down")]
        if groups[0] is None or groups[1] is None:
            raise BuildError(f"{topology} has no process group, which a pipeline needs; start the job with d9d train")
        self._up, self._down = groups[0], groups[1]
        self._leaving: list[tuple[dist.Work, Tensor]] = []
        self._offers: dict[int, deque[_PendingReceive]] = {}
        self._late = cache(self._receives_just_in_time)
        if topology.device.type != "cpu":
            self._open()

    def handlers(self) -> dict[type[Action], Handler]:
        """Handler of each kind of send and receive."""
        return {
            SendActivation: self._send_activation,
            ReceiveActivation: self._receive_activation,
            SendGradient: self._send_gradient,
            ReceiveGradient: self._receive_gradient,
        }

    def _send_activation(self, action: Action, state: StepState) -> None:
        assert isinstance(action, SendActivation)
        outputs = state.outputs.pop((action.stage, action.microbatch))
        self._send(list(outputs.values()), action.stage + 1, state)

    def _send_gradient(self, action: Action, state: StepState) -> None:
        assert isinstance(action, SendGradient)
        gradients = state.input_gradients.pop((action.stage, action.microbatch))
        self._send(list(gradients.values()), action.stage - 1, state)

    def _receive_activation(self, action: Action, state: StepState) -> None:
        assert isinstance(action, ReceiveActivation)
        specs = self._specs(action.stage - 1, action, state)
        state.inputs[action.stage, action.microbatch] = self._receive(specs, action.stage - 1, action, state)

    def _receive_gradient(self, action: Action, state: StepState) -> None:
        assert isinstance(action, ReceiveGradient)
        specs = self._specs(action.stage, action, state)
        floating = {name: spec for name, spec in specs.items() if spec.dtype.is_floating_point}
        state.gradients[action.stage, action.microbatch] = self._receive(floating, action.stage + 1, action, state)

    def _specs(self, stage: int, action: MicrobatchAction, state: StepState) -> Mapping[str, TensorSpec]:
        return self._runner.announced(stage, state.pack[action.microbatch])

    def _send(self, tensors: Sequence[Tensor], to: int, state: StepState) -> None:
        place = self._runner.pipeline.hosts[to]
        group = self._up if place > self._place else self._down
        # Free tensors whose sends are complete: tensors of all microbatches would add up until the end of the step.
        # (On CPUs they do add up, because gloo reports completion only in wait().)
        self._leaving = [(work, tensor) for work, tensor in self._leaving if not work.is_completed()]
        if self._await_sends not in state.ends:
            state.ends.append(self._await_sends)
        for tensor in tensors:
            whole = tensor.contiguous()
            work = dist.isend(whole, group=group, group_dst=place)
            assert work is not None
            self._leaving.append((work, whole))

    def _receive(self, specs: Mapping[str, TensorSpec], stage: int, action: Action, state: StepState) -> Arrival:
        place = self._runner.pipeline.hosts[stage]
        group = self._down if place > self._place else self._up
        offer = _PendingReceive(specs, partial(dist.irecv, group=group, group_src=place), self._runner.topology.device)
        waiting = self._offers.setdefault(place, deque())
        waiting.append(offer)
        if action not in self._late(len(state.pack)):
            _post(waiting, offer)
        return partial(_arrived, waiting, offer)

    def _receives_just_in_time(self, microbatches: int) -> set[Action]:
        pipeline = self._runner.pipeline
        programs = [pipeline.program(place, microbatches) for place in range(pipeline.ranks)]
        return just_in_time(programs)[self._place]

    def _await_sends(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving = []

    def _open(self) -> None:
        """Open the connection of every pair of neighbours, in one order on all ranks.

        A backend connects two ranks when they first communicate, and blocks both until then. In the middle of a program
        that could be a deadlock.
        """
        hosts = self._runner.pipeline.hosts
        pairs = {(hosts[stage], hosts[stage + 1]) for stage in range(len(hosts) - 1)}
        ways = sorted({way for a, b in pairs if a != b for way in ((a, b), (b, a))})
        token = torch.zeros(1, device=self._runner.topology.device)
        for source, target in ways:
            group = self._up if target > source else self._down
            if self._place == source:
                dist.send(token, group=group, group_dst=target)
            elif self._place == target:
                dist.recv(token, group=group, group_src=source)


class _PendingReceive:
    """Receive of tensors from another rank, with the memory for them.

    Args:
        specs: shapes and dtypes of the tensors.
        receive: function that starts to receive into a tensor.
        device: device of the tensors.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], receive: Callable[[Tensor], dist.Work | None], device: torch.device
    ) -> None:
        self._specs, self._receive, self._device = specs, receive, device
        self._tensors: dict[str, Tensor] = {}
        self._works: list[dist.Work | None] = []
        self.posted = False

    def post(self) -> None:
        """Allocate the memory and start to receive."""
        self.posted = True
        for name, spec in self._specs.items():
            self._tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            self._works.append(self._receive(self._tensors[name]))

    def wait(self) -> dict[str, Tensor]:
        for work in self._works:
            if work is not None:
                work.wait()
        return self._tensors


def _post(waiting: deque[_PendingReceive], offer: _PendingReceive) -> None:
    """Post a receive after all earlier receives from the same rank, which arrive first."""
    while not offer.posted:
        waiting.popleft().post()


def _arrived(waiting: deque[_PendingReceive], offer: _PendingReceive) -> dict[str, Tensor]:
    _post(waiting, offer)
    return offer.wait()
