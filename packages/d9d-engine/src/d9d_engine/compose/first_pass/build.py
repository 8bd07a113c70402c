"""Build of a job's first pass: the model that runs it, and stored results if the task asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from d9d_core.data import DataStream
from d9d_core.first_pass import TwoPassTask
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.peft import SwitchesOff
from torch import nn

from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.executor import build_executor, build_frozen_executor
from d9d_engine.compose.first_pass.frozen import assemble_frozen, settle_first_pass
from d9d_engine.compose.first_pass.stored import stored_outputs
from d9d_engine.compose.parts.data import split_of
from d9d_engine.compose.root import Root
from d9d_engine.compose.weights import start_model
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.first_pass import FirstForward, FirstPassRunner, GroupRanks, no_first_pass
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics


@dataclass(frozen=True)
class BuiltFirstPass:
    """First pass of a job; empty if the task makes none.

    Attributes:
        forward: runs the first pass over the microbatches of a step; ``None`` without a first pass.
        store: function from a stream, and the stream's field in the job file, to a runner that looks up stored results;
            ``None`` to run the first pass in each step.
        model: frozen model of the first pass, if it is separate from the trained one.
    """

    forward: FirstForward | None = None
    store: Callable[[DataStream, str], FirstPassRunner] | None = None
    model: nn.Module | None = None

    def over(self, stream: DataStream, where: str) -> FirstPassRunner:
        """Build the runner of a first forward pass over each batch, such as the pass of a reference model.

        Collective over all ranks.

        Args:
            stream: stream at its start; its position is restored.
            where: field of the job file with the dataset.
        """
        if self.forward is None:
            return no_first_pass
        return self.forward if self.store is None else self.store(stream, where)


def build_first_pass(
    root: Root[JobConfig, Selection],
    assembly: Assembly,
    task: CheckedTask,
    own_task: object,
    running: tuple[AuxiliaryLosses, Tallies, Gradients, Statistics],
) -> BuiltFirstPass:
    """Build the first pass of a job, including a frozen model if needed. Collective over all ranks.

    Args:
        root: the job with its plugin records and the topology of this process.
        assembly: trained model, with its initial weights.
        task: checked task of the job.
        own_task: the unwrapped task, which may be a :class:`~d9d_core.first_pass.TwoPassTask`.
        running: auxiliary losses, tallies, gradients and statistics of the trained model's executor.

    Raises:
        D9dError: the job cannot provide the model that the task asks for, or its weights cannot be read.
    """
    if not isinstance(own_task, TwoPassTask):
        return BuiltFirstPass()
    job, selection, topology, note = root.job, root.selection, root.topology, root.note
    chosen = own_task.first_pass
    by = settle_first_pass(chosen, assembly)
    group = topology.axes_group("dp_replicate", "dp_shard") if topology.data_parallel_size > 1 else None
    ranks = GroupRanks(topology.data_parallel_rank, topology.data_parallel_size, group)
    if by in ("copy", "other"):
        beside, frozen = assemble_frozen(root, chosen, by)
        start_model(replace(beside, note=lambda text: note(f"{chosen.where}: {text}")), frozen)
        frozen.model.eval()
        count = sum(parameter.numel() for parameter in frozen.full_model.parameters())
        note(f"{chosen.where}: a frozen model of {count:,} parameters")
        executor = build_frozen_executor(
            beside.job, beside.selection, frozen, topology, task, own_task.first_inputs, topology.world
        )
        return BuiltFirstPass(FirstForward(own_task, executor, nullcontext, ranks), model=frozen.model)
    executor = build_executor(job, selection, assembly, topology, task, *running, own_task.first_inputs)
    model = assembly.model
    if by == "model":
        return BuiltFirstPass(FirstForward(own_task, executor, nullcontext, ranks, draws=True))
    if by == "without_adapter":
        method: object = assembly.peft
        assert isinstance(method, SwitchesOff)
        return BuiltFirstPass(FirstForward(own_task, executor, lambda: _evaluating(model, method), ranks))
    forward = FirstForward(own_task, executor, lambda: _evaluating(model), ranks)
    last = assembly.pipeline.stages_of(topology.coordinate["pp"])
    holds_last = len(assembly.pipeline.stages) - 1 in last

    def store(stream: DataStream, where: str) -> FirstPassRunner:
        split = split_of(task, topology)
        return stored_outputs(job, forward, stream, where, ranks, holds_last, topology, note, split)

    return BuiltFirstPass(forward, store)


@contextmanager
def _evaluating(model: nn.Module, method: SwitchesOff | None = None) -> Iterator[None]:
    """Switch to evaluation mode inside the block, with the fine-tuning method switched off if one is given."""
    training = model.training
    model.eval()
    try:
        with method.off(model) if method is not None else nullcontext():
            yield
    finally:
        model.train(training)
