"""Build of a job's model for forward passes only: weights, but no gradients and no optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor, nn

from d9d_engine.compose.assemble import Assembly, assemble
from d9d_engine.compose.executor import build_frozen_executor
from d9d_engine.compose.kernels import refuse_unused
from d9d_engine.compose.parts.cuda_graphs import step_mark
from d9d_engine.compose.root import Root
from d9d_engine.compose.weights import Published, start_model
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.executor import Executor

Inputs = Callable[[Microbatch], StageInputs]


@dataclass(frozen=True)
class ForwardModel:
    """Model built for forward passes only, with its executor.

    Attributes:
        assembly: stages of the model, with strategies applied.
        published: files and ``config.json`` fields of the pretrained model that an export keeps.
        executor: executor that runs the model.
        holds_last: whether this rank has the last stage, which returns the outputs.
    """

    assembly: Assembly
    published: Published
    executor: Executor
    holds_last: bool

    @property
    def model(self) -> nn.Module:
        """Stages of this rank as one module, in evaluation mode."""
        return self.assembly.model


def assemble_forward(root: Root[BaseJob, Parts]) -> Assembly:
    """Assemble a job's model for forward passes on the meta device. Collective over all ranks.

    Raises:
        BuildError: a requested component has no effect or cannot run.
    """
    assembly = assemble(root, trains=False)
    refuse_unused(root.job.kernels, assembly.kernels, assembly.ops_elsewhere)
    return assembly


def build_forward(
    root: Root[BaseJob, Parts], assembly: Assembly, inputs: Inputs, task: CheckedTask | None = None
) -> ForwardModel:
    """Allocate an assembled model for forward passes, and load its weights. Collective over all ranks.

    Args:
        root: the job with its plugin records and the topology of this process.
        assembly: model from :func:`assemble_forward`.
        inputs: makes the model's keyword arguments for a microbatch.
        task: computes losses; ``None`` if no losses are needed.

    Raises:
        CheckpointError: the weights cannot be read or do not fit, on any rank.
    """
    job, selection, topology = root.job, root.selection, root.topology
    published, _ = start_model(root, assembly)
    assembly.model.eval()
    # Mark the beginning of a step once, for CUDA graphs: until another step is marked, torch keeps all live outputs.
    step_mark(assembly.applied)
    executor = build_frozen_executor(
        job, selection, assembly, topology, task or WithoutLoss(inputs), inputs, topology.world
    )
    last = len(assembly.pipeline.stages) - 1
    holds_last = last in assembly.pipeline.stages_of(topology.coordinate["pp"])
    return ForwardModel(assembly, published, executor, holds_last)


class WithoutLoss:
    """Task of a model that only runs forward: model inputs without losses.

    Args:
        inputs: makes the model's keyword arguments for a microbatch.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @property
    def late(self) -> bool:
        """Always false: there are no loss weights that could depend on outputs."""
        return False

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Always empty: there are no weights of loss terms."""
        return {}

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Always empty: there are no loss terms."""
        return {}

    def check(self, model: object, facts: State) -> None:
        """Accept every model and all data: callers of the executor check the outputs themselves."""

    def count(self, microbatch: Microbatch) -> int:
        """Number of samples in a microbatch."""
        return len(next(iter(microbatch.values())))

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {}

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        return {}
