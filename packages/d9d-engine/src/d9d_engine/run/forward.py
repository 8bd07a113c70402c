"""Forward of the model in training for subscribers, which leaves no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from d9d_core.program.placement import Pipeline
from d9d_core.protocols.task import StageInputs
from d9d_core.types import Microbatch, Pack
from torch import Tensor, nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.executor import Executor
from d9d_engine.step.randomness import generators_kept


class ModelForward:
    """Forward of the model in training: a :class:`~d9d_core.protocols.forward.ForwardPass`.

    Compiled blocks run eagerly.

    Args:
        build: makes the executor, with :func:`inputs_by_name`, on the first call; collective over all ranks.
        model: this rank's stages.
        pipeline: all stages.
        most: microbatches of a training step, which the schedule takes.
        topology: this process among others.
    """

    def __init__(
        self, build: Callable[[], Executor], model: nn.Module, pipeline: Pipeline, most: int, topology: Topology
    ) -> None:
        self._build = build
        self._model = model
        self._pipeline = pipeline
        self._most = most
        self._topology = topology

    @cached_property
    def least_microbatches(self) -> int:
        """Least number of microbatches that the pipeline's schedule takes."""
        return self._pipeline.least_microbatches(self._most)

    def __call__(self, pack: Pack, outputs: Callable[[Mapping[str, Tensor], Microbatch], None]) -> None:
        """Run forward over microbatches. Collective over all ranks, which give packs of the same shapes.

        Args:
            pack: microbatches on the device, each with ``tokens``.
            outputs: called with what the last stage returns for each microbatch, on the ranks that have that stage.
        """
        self._topology.watchdog.beat()
        # Dynamo would compile the training for any shape once it has seen another one here, which changes its numbers.
        eager = torch.compiler.set_stance("force_eager")
        with evaluation_mode(self._model), generators_kept(self._topology.device), eager:
            self._executor.evaluate(pack, outputs)

    @cached_property
    def _executor(self) -> Executor:
        return self._build()


def inputs_by_name(microbatch: Microbatch) -> StageInputs:
    """Inputs of a stage: ``tokens`` enter the first one, and what else there is reaches every stage."""
    shared = {name: tensor for name, tensor in microbatch.items() if name != "tokens"}
    return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode inside the block, and each into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
