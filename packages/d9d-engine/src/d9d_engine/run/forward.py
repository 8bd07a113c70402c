"""Forward passes of the trained model for subscribers, without side effects on training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from d9d_core.errors import TrainingError
from d9d_core.program.placement import Pipeline
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, Pack
from torch import Tensor, nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.executor import Executor
from d9d_engine.step.randomness import generators_kept


class ModelForward:
    """Runs the trained model forward for subscribers; a :class:`~d9d_core.forward.ForwardPass`.

    Compiled blocks run eagerly.

    Args:
        build: makes the executor, with :func:`inputs_by_name`, at the first call; collective over all ranks.
        model: this rank's stages.
        pipeline: all stages.
        most: number of microbatches of a training step, which the schedule is known to support.
        topology: rank, device, meshes and process groups of this process.
        packed: whether samples of the job hold several documents, as assumed when kernels were chosen; ``None`` if
            unknown.
    """

    def __init__(
        self,
        build: Callable[[], Executor],
        model: nn.Module,
        pipeline: Pipeline,
        most: int,
        topology: Topology,
        packed: bool | None = None,
    ) -> None:
        self._build = build
        self._model = model
        self._pipeline = pipeline
        self._most = most
        self._topology = topology
        self._packed = packed

    @cached_property
    def least_microbatches(self) -> int:
        """Smallest number of microbatches with which the pipeline's schedule works."""
        return self._pipeline.least_microbatches(self._most)

    def __call__(self, pack: Pack, outputs: Callable[[Mapping[str, Tensor], Microbatch], None]) -> None:
        """Run forward over microbatches. Collective over all ranks, with packs of the same shapes on each.

        Args:
            pack: microbatches on the device, each with ``tokens``.
            outputs: called with the last stage's outputs and the microbatch, on the ranks that have the last stage.

        Raises:
            TrainingError: a sample holds several documents, but kernels were chosen for one document per sample; or
                ``mesh.cp`` splits the positions of samples.
        """
        self._topology.watchdog.beat()
        if self._topology.sizes.get("cp", 1) > 1:
            raise TrainingError(
                "a forward pass during training needs full samples, but ranks of cp have parts of samples; remove the "
                "subscriber that runs one, such as one that draws samples, or mesh.cp"
            )
        if self._packed is False:
            for microbatch in pack:
                _check_documents(microbatch)
        # A new input shape would make Dynamo recompile the training for dynamic shapes, which changes its results.
        eager = torch.compiler.set_stance("force_eager")
        with evaluation_mode(self._model), generators_kept(self._topology.device), eager:
            self._executor.evaluate(pack, outputs)

    @cached_property
    def _executor(self) -> Executor:
        return self._build()


def inputs_by_name(microbatch: Microbatch) -> StageInputs:
    """Inputs of a stage: ``tokens`` for the first stage, all other tensors for every stage."""
    shared = {name: tensor for name, tensor in microbatch.items() if name != "tokens"}
    return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)


def _check_documents(microbatch: Microbatch) -> None:
    """Raise if a sample holds several documents. Waits for the device if there are ``documents``."""
    documents, lengths = microbatch.get("documents"), microbatch.get("lengths")
    if documents is None:
        return
    others = documents != documents[:, :1]
    if lengths is not None:
        others = others & (torch.arange(documents.shape[1], device=documents.device) < lengths[:, None])
    if others.any():
        raise TrainingError(
            "a sample of this microbatch holds several documents, but the job's data declares one document per "
            "sample, so attention kernels may ignore 'documents'; make each document a separate sample, or "
            "mark padding after a sample by 'lengths'"
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode inside the block, and restore each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
