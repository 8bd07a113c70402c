"""Model of a job that is built to run forward only: its weights, and no memory for gradients or an optimizer."""

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
    """Model that is built to run forward only, with its executor.

    Attributes:
        assembly: its stages, with strategies applied.
        published: parts of the model it starts from beside the weights.
        executor: runs it.
        holds_last: whether this rank has the last stage, which gives the outputs.
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
    """Assemble a job's model on the meta device, without anything that trains. Collective over all ranks.

    Raises:
        BuildError: a part asked for has no effect or cannot run.
    """
    assembly = assemble(root, trains=False)
    refuse_unused(root.job.kernels, assembly.kernels, assembly.ops_elsewhere)
    return assembly


def build_forward(
    root: Root[BaseJob, Parts], assembly: Assembly, inputs: Inputs, task: CheckedTask | None = None
) -> ForwardModel:
    """Build a model to run forward only: an assembled one gets memory and weights. Collective over all ranks.

    Args:
        root: the job in this process.
        assembly: from :func:`assemble_forward`.
        inputs: keyword arguments of the model for a microbatch.
        task: has the losses, for whoever measures them; a model that only runs has none.

    Raises:
        CheckpointError: the weights cannot be read or do not fit, on any rank.
    """
    job, selection, topology = root.job, root.selection, root.topology
    published, _ = start_model(root, assembly)
    assembly.model.eval()
    step_mark(assembly.applied)  # what is alive stays: no step follows
    executor = build_frozen_executor(
        job, selection, assembly, topology, task or WithoutLoss(inputs), inputs, topology.world
    )
    last = len(assembly.pipeline.stages) - 1
    holds_last = last in assembly.pipeline.stages_of(topology.coordinate["pp"])
    return ForwardModel(assembly, published, executor, holds_last)


class WithoutLoss:
    """Task of a model that only runs forward: it has inputs and no loss.

    Args:
        inputs: keyword arguments of the model for a microbatch.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @property
    def late(self) -> bool:
        """No weight that outputs tell."""
        return False

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """No weights."""
        return {}

    @property
    def coefficients(self) -> Mapping[str, float]:
        """No loss terms."""
        return {}

    def check(self, model: object, facts: State) -> None:
        """Accept every model and all data: whoever wants the outputs has compared them."""

    def count(self, microbatch: Microbatch) -> int:
        """Number of samples."""
        return len(next(iter(microbatch.values())))

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """No weights."""
        return {}

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """No losses."""
        return {}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """No observations."""
        return {}
