"""Evaluation of a trained model, composed without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.errors import CheckpointError
from d9d_core.first_pass import TwoPassTask
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Part, Selection
from d9d_core.metric import StageMetric, Table
from d9d_core.tensors import local
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.compose.first_pass.build import build_first_pass
from d9d_engine.compose.forward import ForwardModel, assemble_forward, build_forward
from d9d_engine.compose.parts.evaluator import Surroundings, build_set
from d9d_engine.compose.root import build_task, compose_root
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import open_store
from d9d_engine.run.evaluation import Evaluator, likelihood_of
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.ownership import DATA_AXES
from d9d_engine.step.tied import find_ties
from d9d_weights.progress import SampleBar
from d9d_weights.sharding.model_tensors import model_tensors
from torch import Tensor
from torch import distributed as dist

from d9d_inference.evaluation.choice import Which, choose_checkpoint
from d9d_inference.evaluation.result import Evaluated, Report
from d9d_inference.evaluation.samples import SampleLosses, SampleRecorder
from d9d_inference.evaluation.subject import Subject

Note = Callable[[str], None]
V = TypeVar("V")
_MODEL = "model/"


@dataclass(frozen=True)
class Options:
    """Options of an evaluation.

    Attributes:
        limit: count only samples that begin in the first ``limit`` rows of the dataset; ``None`` counts all.
        compared: whether to keep the losses of each sample, for a comparison of two models.
    """

    limit: int | None = None
    compared: bool = False


def evaluate(
    subject: Subject, topology: Topology, note: Note, limit: int | None = None, other: Subject | None = None
) -> Report:
    """Evaluate a model, and optionally compare it with another model. Collective over all ranks.

    Args:
        subject: model and data.
        topology: rank, device, meshes and process groups of this process.
        note: prints a line.
        limit: count only samples that begin in the first ``limit`` rows of the dataset; ``None`` counts all.
        other: model to compare with, on the same data.

    Raises:
        D9dError: the job, the data or the weights cannot be used.
    """
    options = Options(limit, other is not None)
    first, losses = _evaluated(subject, topology, note, options)
    if other is None:
        return Report(first)
    second, others = _evaluated(other, topology, note, options)
    return Report(first, second, {name: of.difference(others[name], name) for name, of in losses.items()})


def _evaluated(
    subject: Subject, topology: Topology, note: Note, options: Options
) -> tuple[Evaluated, Mapping[str, SampleLosses]]:
    """Evaluate one model: return its losses and metrics and, if ``options.compared``, the losses of each sample by set.

    Collective over all ranks.
    """
    job: JobConfig = subject.job
    selection: Selection = subject.job.check_layout(topology.world_size)
    root = compose_root(job, selection, subject.job.registry, topology, note)
    own_task = build_task(job, selection, topology)
    task = CheckedTask(selection.task, own_task)
    assembly = assemble_forward(root)
    checkpoint = _checkpoint(subject, topology, note)
    # Skip weights that the checkpoint replaces, unless a first pass needs the initial weights.
    complete = checkpoint is not None and not checkpoint.manifest.get("left_out")
    drawn = complete and not isinstance(own_task, TwoPassTask)
    start = job.model_copy(update={"loading": job.loading.model_copy(update={"weights": False})}) if drawn else job
    forward = build_forward(replace(root, job=start), assembly, task.inputs, task)
    several = topology.world_size > 1
    group = topology.axes_group("pp", *DATA_AXES) if several else None
    running = (
        AuxiliaryLosses(assembly.stages, assembly.full_model, task),
        Tallies(assembly.stages),
        Gradients({}, assembly.ownership, topology, reducers=assembly.reducers),
        Statistics({}, gated=False, group=group, device=topology.device),
    )
    first = build_first_pass(root, assembly, task, own_task, running)
    surroundings = Surroundings(job, assembly, topology, task, group, note)
    metrics = _over_outputs(selection)
    sets = [
        build_set(surroundings, name, part, None, metrics, first, options.limit)
        for name, part in zip(_section(job), selection.evaluation, strict=True)
    ]
    # Load the checkpoint after the first pass was built, whose reference model needs the initial weights.
    if checkpoint is not None:
        _load(checkpoint, forward, topology)
    note(f"model: {_origin(subject, checkpoint)} on {topology.device}")
    recorder = SampleRecorder(task) if options.compared else None
    topology.watchdog.phase("step", 0)
    tables: dict[str, Table] = {}
    packs = sum(one.packs for one in sets)
    with SampleBar("evaluation", packs * job.batch.size, shown=topology.is_main) as bar:

        def beat() -> None:
            topology.watchdog.beat()
            bar.add(job.batch.size)

        evaluator = Evaluator(
            task, forward.executor, forward.model, sets, group, beat, likelihood_of(own_task), recorder
        )
        values = evaluator.run(tables.update)
    for one in sets:
        one.prefetcher.close()
    found = Evaluated(
        subject.name,
        None if checkpoint is None else checkpoint.step,
        {one.name: _under(one.prefix, values) for one in sets},
        {one.name: evaluator.counted[one.name] for one in sets},
        {one.name: {name: table.values.tolist() for name, table in _under(one.prefix, tables).items()} for one in sets},
    )
    return found, _losses(recorder, _section(job), group)


def _section(job: JobConfig) -> list[str]:
    assert job.evaluation is not None
    return list(job.evaluation.datasets)


def _losses(
    recorder: SampleRecorder | None, names: list[str], group: dist.ProcessGroup | None
) -> dict[str, SampleLosses]:
    return {} if recorder is None else {name: recorder.gather(name, group) for name in names}


def _under(prefix: str, values: Mapping[str, V]) -> dict[str, V]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _over_outputs(selection: Selection) -> list[Part]:
    """Evaluation metrics that read the task's outputs; metrics that read modules work in training only."""
    return [
        (chosen, config)
        for chosen, config in selection.evaluation_metrics
        if not isinstance(instantiate(chosen, config), StageMetric)
    ]


def _checkpoint(subject: Subject, topology: Topology, note: Note) -> Checkpoint | None:
    """Open the checkpoint with the weights; ``None`` for pretrained weights. Collective over all ranks."""
    if not subject.run:
        return None
    which: Which = int(subject.checkpoint) if subject.checkpoint.isdecimal() else subject.checkpoint  # type: ignore[assignment]
    found = choose_checkpoint(open_store(subject.job, topology, note, write=False), which, note)
    if found is None:
        raise CheckpointError(f"{subject.name}: the run has no checkpoint; train first (d9d train)")
    return found


def _load(checkpoint: Checkpoint, forward: ForwardModel, topology: Topology) -> None:
    """Load the model's weights from a checkpoint. Collective over all ranks."""
    assembly = forward.assembly
    tensors = {_MODEL + name: tensor for name, tensor in model_tensors(forward.model).items()}
    left_out = set(checkpoint.manifest.get("left_out", ()))
    checkpoint.load_into(tensors, _MODEL, left_out & tensors.keys())
    if (average := checkpoint.manifest.get("average")) is not None:
        _average(checkpoint, tensors, average["slot"], average["weight"])
    find_ties(assembly.stages, assembly.shared, assembly.trainable, assembly.pipeline, topology).copy_values()


@torch.no_grad()
def _average(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], slot: str, weight: float) -> None:
    """Replace the trained weights by their averages. Collective over all ranks.

    Args:
        checkpoint: checkpoint with the optimizer's state.
        tensors: name in the checkpoint -> weight, already loaded.
        slot: name of the optimizer's state tensor that the average is computed from.
        weight: share of that tensor in the average; the rest is the loaded weight.
    """
    table = checkpoint.manifest["tensors"]
    slots = {name: f"optimizer/{name.removeprefix(_MODEL)}/{slot}" for name in tensors}
    others = {
        saved: torch.empty_like(tensors[name], dtype=getattr(torch, table[saved]["dtype"]))
        for name, saved in slots.items()
        if saved in table
    }
    checkpoint.load_into(others, "optimizer/", only=True)
    for name, saved in slots.items():
        if saved in others:
            own, other = local(tensors[name]), local(others[saved])
            own.copy_(torch.lerp(own.to(other.dtype), other, weight))


def _origin(subject: Subject, checkpoint: Checkpoint | None) -> str:
    return subject.name if checkpoint is None else f"{subject.name}, step {checkpoint.step}"
