"""Collectives of one training step on one rank, from declarations, without running the step or other processes.

Strategies declare their collectives (:attr:`d9d_core.strategy.Applied.collectives`); this module adds pipeline
transfers and the training loop's own reductions. Communication of evaluations and checkpoints, and undeclared
communication of plugins, are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.data import sample_lengths
from d9d_core.first_pass import TwoPassTask
from d9d_core.grid import AXES, Grid
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.metric import Metric
from d9d_core.optimizer import DeclaresCollectives, Optimizer
from d9d_core.plugin import StrategySpec
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    compute_parts,
)
from d9d_core.strategy import Collective, Kind, Pass, StepShape
from d9d_core.task import OwnsMetrics, Task, UsesTopology
from d9d_core.tensors import wide_dtype
from d9d_core.types import TensorSpec
from torch import Tensor
from torch import distributed as dist

from d9d_engine.compose.assemble import Assembly
from d9d_engine.distributed.mesh import Topology, place_along
from d9d_engine.distributed.packed_reduction import PackedReduction
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.ownership import DATA_AXES
from d9d_engine.step.tied import find_ties


@dataclass(frozen=True)
class Entry:
    """Collective of a step with its source.

    Attributes:
        source: name of a strategy, or part of the training loop.
        collective: declared collective.
    """

    source: str
    collective: Collective


@dataclass(frozen=True)
class StepCollectives:
    """Collectives of a step, and of a logged step's metrics, on one rank.

    Attributes:
        rank: number of the rank.
        entries: collectives of a step.
        logged: collectives that merge the states of metrics when a step is logged.
        unknown: one line for each component that may communicate without a declaration.
    """

    rank: int
    entries: Sequence[Entry]
    logged: Sequence[Entry]
    unknown: Sequence[str]

    @property
    def total(self) -> Mapping[str, tuple[float, int]]:
        """Kind -> number of calls and of bytes in a step, on average; calls of unknown size add no bytes."""
        found: dict[str, tuple[Fraction, Fraction]] = {}
        for entry in self.entries:
            one = entry.collective
            calls, size = found.get(one.kind, (Fraction(), Fraction()))
            share = Fraction(one.count, one.every)
            found[one.kind] = (calls + share, size + (one.bytes or 0) * share)
        return {kind: (_rounded(calls), round(size)) for kind, (calls, size) in found.items()}


def _rounded(number: Fraction) -> float:
    return int(number) if number.denominator == 1 else round(float(number), 3)


def step_collectives(
    job: JobConfig, selection: Selection, assembly: Assembly, topology: Topology, task: Task, optimizer: Optimizer
) -> StepCollectives:
    """List the collectives of a step on this rank. Creates process groups: collective over all ranks.

    Args:
        job: validated job.
        selection: plugin records of the job.
        assembly: this rank's stages, with all strategies applied.
        topology: rank, meshes and process groups of this process, possibly simulated.
        task: task of the job.
        optimizer: optimizer of the job.
    """
    checked = CheckedTask(selection.task, task)
    program = assembly.pipeline.program(topology.coordinate["pp"], job.microbatches)
    shapes = {index: shape_of(job, assembly, program, index) for index in assembly.stages}
    # _of_loop runs first: it sets the dtype of accumulated gradients, in which strategies may reduce.
    loop = list(_of_loop(job, assembly, topology, checked))
    entries = [
        *_of_strategies(assembly, shapes),
        *_of_program(job, assembly, topology, program),
        *loop,
        *_of_optimizer(selection, optimizer),
    ]
    several = topology.world_size > 1
    return StepCollectives(
        topology.rank,
        [entry for entry in entries if len(entry.collective.ranks) > 1],
        list(_of_metrics(selection, topology, task)) if several else [],
        list(_unknown(selection, assembly, task, optimizer)) if several else [],
    )


def shape_of(job: JobConfig, assembly: Assembly, program: Program, stage: int) -> StepShape:
    """Passes and sizes of a step on one of this rank's stages, from which strategies compute their collectives."""
    lengths = sample_lengths(job.data)
    most = None if lengths is None else lengths.most
    parameters = getattr(torch, job.precision.parameters)
    autocast = job.precision.autocast
    dtype = getattr(torch, autocast) if autocast else assembly.compute_dtype or parameters
    return StepShape(
        passes=tuple(
            _PASSES[type(part)]
            for action in program
            for part in compute_parts(action)
            if part.stage == stage and type(part) in _PASSES
        ),
        samples=job.microbatch_size * (1 if lengths is None else lengths.texts),
        positions=None if most is None else most // job.mesh.cp,
        itemsize=dtype.itemsize,
        approximate=autocast is not None or (lengths is not None and lengths.fixed is None),
    )


_PASSES: Mapping[type[Action], Pass] = {
    Forward: "forward",
    Backward: "backward",
    InputBackward: "input_backward",
}


def _of_strategies(assembly: Assembly, shapes: Mapping[int, StepShape]) -> Iterator[Entry]:
    """Collectives that strategies declare; forwards in checkpointed blocks are listed again, as a recomputation."""
    repeated = [
        name
        for chosen, applied in assembly.applied
        if isinstance(chosen.spec, StrategySpec) and chosen.spec.anchor == "checkpointing"
        for name in applied.modules
    ]
    for index, declared in assembly.communication.items():
        for chosen, communication in declared:
            if communication is None:
                continue
            for one in communication(shapes[index]):
                yield Entry(chosen.spec.name, one)
                if one.module is not None and any(f"{one.module}.".startswith(f"{name}.") for name in repeated):
                    purpose = f"{one.purpose.removesuffix(', forward')}, recomputation"
                    yield Entry(chosen.spec.name, replace(one, purpose=purpose, at_most=True))


def _of_program(job: JobConfig, assembly: Assembly, topology: Topology, program: Program) -> Iterator[Entry]:
    """Sends and receives between pipeline stages: one entry per tensor."""
    hosts = assembly.pipeline.hosts
    line = Grid({axis: topology.sizes[axis] for axis in AXES}).group(topology.rank, ["pp"])
    counted: dict[tuple[type[Action], int], int] = {}
    for action in program:
        if isinstance(action, MicrobatchAction) and type(action) in _TRANSFERS:
            key = (type(action), action.stage)
            counted[key] = counted.get(key, 0) + 1
    lengths = sample_lengths(job.data)
    for (kind, stage), count in counted.items():
        way, other, gradients = _TRANSFERS[kind]
        maker = min(stage, stage + other)  # stage that produces the tensors
        ranks = tuple(sorted((topology.rank, line[hosts[stage + other]])))
        what = f"{'gradients of ' if gradients else ''}outputs of stage {maker}"
        unknown: dict[str, TensorSpec | None] = {"": None}
        for name, spec in (handed_on(job, assembly, maker) or unknown).items():
            if gradients and spec is not None and not spec.dtype.is_floating_point:
                continue
            size = None if spec is None else torch.Size(spec.shape).numel() * spec.dtype.itemsize
            guess = lengths is None or lengths.fixed is None
            text = what if spec is None else f"{what}: {name}"
            yield Entry("pipeline", Collective(way, "pp", ranks, size, count, text, approximate=guess))


#: Action -> kind of call, offset from the action's stage to the other rank's stage, and whether gradients are sent.
_TRANSFERS: Mapping[type[Action], tuple[Kind, int, bool]] = {
    SendActivation: ("send", 1, False),
    ReceiveActivation: ("receive", -1, False),
    SendGradient: ("send", -1, True),
    ReceiveGradient: ("receive", 1, True),
}


def handed_on(job: JobConfig, assembly: Assembly, stage: int) -> Mapping[str, TensorSpec] | None:
    """Tensors that a stage passes to the next one; ``None`` if they depend on the data."""
    lengths = sample_lengths(job.data)
    if lengths is None or lengths.most is None:
        return None
    spec = TensorSpec((job.microbatch_size * lengths.texts, lengths.most // job.mesh.cp), torch.int64)
    try:
        return Boundaries(assembly.outlines, assembly.compute_dtype).announced(stage, Unread(spec))
    except Exception:  # the keys of a microbatch depend on the data, which is not read here
        return None


def _of_loop(job: JobConfig, assembly: Assembly, topology: Topology, task: CheckedTask) -> Iterator[Entry]:
    """Collectives of the training loop: for loss weights, gradients that no strategy reduces, scalars, and tallies."""
    if topology.world_size == 1:
        return
    world, data = tuple(range(topology.world_size)), topology.axes_group(*DATA_AXES)
    samples = _ranks(data)
    auxiliary = AuxiliaryLosses(assembly.stages, assembly.full_model, task)
    terms = len(task.coefficients) + len(auxiliary.terms)
    _, replicas = place_along(topology, assembly.ownership.apart)
    if task.late:
        everywhere = _ranks(topology.axes_group("pp", *DATA_AXES))
        yield _reduced("loss", "pp x data", everywhere, 4 * replicas, "weight of the loss")
    else:
        yield _reduced("loss", "data", samples, 4 * terms * replicas, "weights of the loss terms")
    accumulate = getattr(torch, job.gradients.accumulate) if job.gradients.accumulate else None
    here = dict(assembly.model.named_parameters())
    trained = {name: parameter for name, parameter in here.items() if name in assembly.trainable}
    ties = find_ties(assembly.stages, assembly.shared, assembly.trainable, assembly.pipeline, topology, accumulate)
    gradients = Gradients(
        trained,
        assembly.ownership,
        topology,
        reducers=assembly.reducers,
        bucket_mib=job.gradients.bucket_mib,
        accumulate=accumulate,
        ties=ties,
    )
    for what, group, size in gradients.reductions():
        ranks = _ranks(group)
        yield _reduced("gradients", _dims(topology, ranks), ranks, size, what)
    wide = wide_dtype(topology.device).itemsize
    yield _reduced("totals", "world", world, (terms + 2 + replicas) * wide, "loss terms, tokens, stop, gradient norm")
    if job.gradient_clipping.p == float("inf"):
        yield _reduced("totals", "world", world, replicas * wide, "maximum norm of gradients")
    for size in Tallies(assembly.stages).adapted_bytes():
        yield _reduced("tallies", "data", samples, size, "tallies that modules adapt to")


def _of_optimizer(selection: Selection, optimizer: Optimizer) -> Iterator[Entry]:
    declared = optimizer.collectives() if isinstance(optimizer, DeclaresCollectives) else None
    for one in declared or ():
        yield Entry(selection.optimizer.spec.name, one)


def _of_metrics(selection: Selection, topology: Topology, task: Task) -> Iterator[Entry]:
    """Collectives of a logged step: one all-reduce of metric states for each operation and dtype."""
    metrics: list[Metric] = [instantiate(chosen, config) for chosen, config in selection.metrics]
    metrics += task.metrics().values() if isinstance(task, OwnsMetrics) else ()
    tensors: dict[str, Tensor] = {}
    operations: dict[str, str] = {}
    for number, metric in enumerate(metrics):
        state = metric.state()
        for key, reduction in metric.reductions.items():
            tensors[f"{number}/{key}"], operations[f"{number}/{key}"] = state[key], reduction
    group = _ranks(topology.axes_group("pp", *DATA_AXES))
    if len(group) > 1:
        for (operation, _), buffer in PackedReduction.of(tensors, operations, None).buffers.items():
            yield _reduced("metrics", "pp x data", group, buffer.nbytes, f"{operation} of states")


def _unknown(selection: Selection, assembly: Assembly, task: Task, optimizer: Optimizer) -> Iterator[str]:
    """One line for each component that may communicate without declaring its collectives."""
    silent = dict.fromkeys(
        str(chosen.entry)
        for declared in assembly.communication.values()
        for chosen, communication in declared
        if communication is None
    )
    for entry in silent:
        yield f"strategy {entry} does not declare its collectives"
    if isinstance(task, TwoPassTask):
        yield f"task {selection.task.entry}: its first pass over the batch"
    if isinstance(task, UsesTopology):
        yield f"task {selection.task.entry}: its own communication, if any"
    if not isinstance(optimizer, DeclaresCollectives) or optimizer.collectives() is None:
        yield f"optimizer {selection.optimizer.entry} does not declare its collectives"


def _reduced(source: str, group: str, ranks: tuple[int, ...], size: int, purpose: str) -> Entry:
    return Entry(source, Collective("all_reduce", group, ranks, size, 1, purpose))


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return (0,) if group is None else tuple(dist.get_process_group_ranks(group))


def _dims(topology: Topology, ranks: Iterable[int]) -> str:
    """Names of the base axes along which the given ranks have different coordinates."""
    grid = Grid({axis: topology.sizes[axis] for axis in AXES})
    places = [grid.coordinate(rank) for rank in ranks]
    return " x ".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)


class Unread(Mapping[str, TensorSpec]):
    """Placeholder for a microbatch before the data is read: every key has the same tensor spec."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def __getitem__(self, name: str) -> TensorSpec:
        return self._spec

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
