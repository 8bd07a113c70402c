"""Training loops of your own: stages with strategies, and their forward, backward and gradient sums, without a job.

Start here: functions apply strategies to the stages of a model, and :class:`OwnLoop` runs the training steps::

    torch.distributed.init_process_group()
    topology = topology_of(dp_shard=2)
    stages = build_stages(lambda stage: Llama(config, stage), topology)
    fsdp(stages, match=["layers.*"])
    loop = OwnLoop(stages, CausalLM(CausalLMConfig()), max_norm=1.0)
    optimizer = torch.optim.AdamW(loop.parameters(), lr=1e-3, foreach=False)
    for pack in packs:  # microbatches of this rank
        print(loop.step(pack).loss)
        optimizer.step()
        loop.end_step()

Strategies are applied in the order of a job: tensor, context and expert parallelism, activation checkpointing and
compilation, then data parallelism. ``examples/own_loop`` is a complete script.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from d9d_core.config import ScheduleConfig
from d9d_core.errors import BuildError, TrainingError
from d9d_core.events import StepResult
from d9d_core.job_file.inner import choose
from d9d_core.job_file.job import Mesh
from d9d_core.model import Stage
from d9d_core.plugin import ANCHORS, POSITIONS, ScheduleSpec, StrategySpec, ViewSpec
from d9d_core.program.placement import Pipeline, scheduled
from d9d_core.program.runner import Handler, StageRunner
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_core.registry.loader import discover
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Action
from d9d_core.strategy import Applied, Strategy
from d9d_core.task import SplitsPositions, Task, WeighsOutputs
from d9d_core.types import Microbatch, Pack
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.compose.assemble import merged, refuse_unmatched, shared_names, split_sequences
from d9d_engine.compose.initialise import Undrawn
from d9d_engine.compose.joined_stages import joined_stages
from d9d_engine.compose.kernels import bind_kernels, ops_elsewhere, refuse_unused
from d9d_engine.compose.parts.matches import check_conversions
from d9d_engine.compose.weights import materialise
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.checked_task import LossTask
from d9d_engine.step.clip import Clipper, GradientNorm
from d9d_engine.step.executor import Executor, Outputs
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.loss import LossScale
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.ownership import DATA_AXES, check_replicas, settle
from d9d_engine.step.randomness import MicrobatchSeeds
from d9d_engine.step.tied import find_ties

__all__ = ["OwnLoop", "Stages", "build_schedule", "build_stages", "topology_of"]


def topology_of(registry: Registry | None = None, **mesh: int) -> Topology:
    """Topology of this process in the default process group; without a process group, of a single process.

    Args:
        registry: registry with the views of the mesh; by default, the installed plugins.
        mesh: axis -> size, as in a job's section ``mesh``.

    Raises:
        BuildError: the mesh has another number of ranks than the process group.
    """
    registry = registry or discover()
    sizes, world = Mesh(**mesh).sizes(), dist.get_world_size() if dist.is_initialized() else 1
    if (ranks := Mesh(**mesh).world_size) != world:
        raise BuildError(
            f"the mesh has {ranks} rank(s), but the default process group has {world}; call "
            "torch.distributed.init_process_group() first, and start as many processes as the mesh has ranks"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    specs = (registry.find("view", entry.spec.key).spec for entry in registry.entries("view"))
    views = {spec.name: spec for spec in specs if isinstance(spec, ViewSpec)}
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Topology(sizes=sizes, rank=rank, world_size=world, local_rank=local, device=device, views=views)


@dataclass(frozen=True)
class LoopSchedule:
    """Schedule of a pipeline, made by :func:`build_schedule`.

    Attributes:
        pipeline: assignment of stages to ranks, and the ranks' programs.
        handlers: function that makes the handlers of the schedule's own actions; ``None`` if the schedule has none.
    """

    pipeline: Pipeline = field(default_factory=Pipeline)
    handlers: Callable[[StageRunner], Mapping[type[Action], Handler]] | None = None


def build_schedule(
    config: ScheduleConfig, topology: Topology, microbatches: int, registry: Registry | None = None
) -> LoopSchedule:
    """Build a pipeline schedule from its config, such as ``OneForwardOneBackwardConfig()`` of d9d-pipeline.

    Args:
        config: config of the schedule; ``layers`` sets the layers of each stage.
        topology: topology with the size of ``pp``.
        microbatches: number of microbatches in a step.
        registry: registry with the schedule; by default, the installed plugins.

    Raises:
        BuildError: the schedule does not support these numbers of ranks and microbatches.
        PluginError: no plugin has the schedule.
    """
    chosen = choose(registry or discover(), "schedule", "schedule", config)
    assert isinstance(chosen.spec, ScheduleSpec)
    handlers = None if chosen.spec.handlers is None else partial(chosen.spec.handlers.load(), config)
    return LoopSchedule(scheduled(chosen, config, topology.sizes["pp"], microbatches), handlers)


class Stages:
    """Stages of a model on this rank, made by :func:`build_stages`, and the strategies that were applied to them.

    Attributes:
        topology: topology of this process.
        here: index -> stage of this rank; on the meta device until :class:`OwnLoop` allocates it.
        schedule: schedule of the pipeline.
        full: all stages of the model as one module; stages of other ranks stay on the meta device, without strategies.
        outlines: all stages but the last, on the meta device and without strategies.
        shared: name of each parameter that several stages have -> indices of these stages.
        applied: effects of the strategies, by stage.
        allocated: whether an :class:`OwnLoop` has allocated the stages, so that no strategy can be applied any more.
    """

    def __init__(self, everything: Sequence[nn.Module], schedule: LoopSchedule, topology: Topology) -> None:
        self.schedule, self.topology = schedule, topology
        here = schedule.pipeline.stages_of(topology.coordinate["pp"])
        self.here = {index: everything[index] for index in here}
        self.full = joined_stages(list(everything))
        self.outlines = [deepcopy(one) if index in self.here else one for index, one in enumerate(everything[:-1])]
        self.shared = shared_names(everything)
        self.applied: dict[int, list[tuple[str, Applied]]] = {index: [] for index in self.here}
        self.allocated = False

    def apply(self, strategy: Strategy, name: str) -> Applied:
        """Apply a strategy to every stage of this rank. Collective over all ranks.

        Args:
            strategy: strategy; the functions of d9d-parallel and d9d-moe make them from keyword arguments.
            name: name of the strategy in messages.

        Raises:
            BuildError: a stage lacks a trait or module that the strategy needs, a pattern matches no module in any
                stage, or the stages are allocated already.
        """
        if self.allocated:
            raise BuildError(
                f"strategy '{name}' came after OwnLoop(), which allocates the stages; apply all strategies before"
            )
        outcomes = {index: strategy.apply(stage, self.topology) for index, stage in self.here.items()}
        refuse_unmatched(outcomes.values(), self.topology, several=len(self.outlines) > 0)
        for index, outcome in outcomes.items():
            self.applied[index].append((name, outcome))
        whole = merged(list(outcomes.values()))
        split_sequences(self.outlines, whole.sequence_ranks)
        return whole


def build_stages(
    build: Callable[[Stage], nn.Module],
    topology: Topology,
    schedule: LoopSchedule | None = None,
    dtype: torch.dtype = torch.float32,
) -> Stages:
    """Build the stages of a model on the meta device, without values. All ranks build the same stages.

    Args:
        build: stage -> module with the trait ``LateInit`` in each module with parameters.
        topology: topology of this process.
        schedule: schedule of the pipeline; without one, the model has one stage.
        dtype: dtype of the parameters.

    Raises:
        BuildError: the mesh has pipeline ranks, but there is no schedule.
    """
    if schedule is None and topology.sizes["pp"] > 1:
        raise BuildError(f"mesh.pp is {topology.sizes['pp']}, but there is no schedule; give one by build_schedule()")
    schedule = schedule or LoopSchedule()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), Undrawn():
            everything = [build(stage) for stage in schedule.pipeline.stages]
    finally:
        torch.set_default_dtype(before)
    return Stages(everything, schedule, topology)


class OwnLoop:
    """Step of a training loop of your own: forward, backward, sums over ranks, and clipping.

    Collective over all ranks. Chooses kernels as a job does, allocates the stages and initialises them with the same
    values in every layout.

    Args:
        stages: stages of this rank, after all strategies.
        task: computes inputs of the model and sums of the loss, see :mod:`d9d_core.task`.
        max_norm: largest norm of all gradients; ``None`` does not clip.
        autocast: autocast dtype of the forward; ``None`` disables autocast.
        kernels: op -> name of its backend; other ops get the backend that a job would choose.
        unsplittable: names of the modules whose backward cannot be split, such as compiled or checkpointed blocks.
        microbatch_size: number of samples in a microbatch, from which the seeds of dropout are derived.
        seed: seed of initial weights and dropout.
        registry: registry with the kernels; by default, the installed plugins.

    Raises:
        BuildError: the strategies do not fit together: two of them reduce one gradient, one converts the parameters of
            a part of the model and none converts the rest, they were applied in another order than in a job, none of
            them uses an axis of ``tp``, ``cp`` and ``ep`` that has several ranks, or replicas would take their own
            steps. Or another loop has allocated the stages, ``max_norm`` or ``kernels`` is invalid, a requested kernel
            refuses its op, the model does not call the op, or ``cp`` has several ranks and the task cannot split
            positions.
    """

    def __init__(
        self,
        stages: Stages,
        task: Task,
        *,
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        kernels: Mapping[str, str] | None = None,
        unsplittable: frozenset[str] = frozenset(),
        microbatch_size: int = 1,
        seed: int = 0,
        registry: Registry | None = None,
    ) -> None:
        registry = registry or discover()
        _check_stages(stages, registry)
        if max_norm is not None and not max_norm > 0:
            raise BuildError(f"max_norm is {max_norm}; give a positive number, or None for no clipping")
        for op, name in (kernels or {}).items():
            if not isinstance(name, str):
                raise BuildError(
                    f"kernels[{op!r}] is {name!r}; give the name of a backend; rules for some modules need a job"
                )
        stages.allocated = True
        self.topology = topology = stages.topology
        loss_task: Any = _LossOfTask(task)
        self._task: LossTask = loss_task
        self._split = _positions(task, topology)
        self._count, self._ended = 0, True
        outcomes = [(name, one) for of_stage in stages.applied.values() for name, one in of_stage]
        converted = next((one.compute_dtype for _, one in reversed(outcomes) if one.compute_dtype is not None), None)
        if autocast is None:
            placed = [(f"strategy '{name}'", one) for name, one in outcomes]
            check_conversions(stages.here.values(), placed, "autocast of OwnLoop()")
        self._bind(stages, kernels or {}, autocast or converted, outcomes, registry)
        for index, stage in stages.here.items():
            host = frozenset(name for _, one in stages.applied[index] for name in one.on_host)
            materialise(stage, host, seed, topology.device)
        self.model = joined_stages(list(stages.here.values()))
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        all_trained = {name for name, parameter in stages.full.named_parameters() if parameter.requires_grad}
        pipeline = stages.schedule.pipeline
        self._ties = find_ties(stages.here, stages.shared, all_trained, pipeline, topology)
        self._ties.copy_values()
        ownership = settle(trained, topology, outcomes)
        ownership = check_replicas(dict(self.model.named_parameters()), ownership, topology, outcomes)
        if ownership.apart:
            raise BuildError(
                "replicas that take their own steps, as with local_sgd, need a job; see docs/parallelism.md"
            )
        reducers = {i: [r for _, one in of_stage for r in one.reducers] for i, of_stage in stages.applied.items()}
        self._gradients = Gradients(trained, ownership, topology, reducers, ties=self._ties)
        data, everywhere = (
            topology.axes_group(*axes) if topology.world_size > 1 else None for axes in (DATA_AXES, ("pp", *DATA_AXES))
        )
        auxiliary = AuxiliaryLosses(stages.here, stages.full, self._task, topology.sizes["cp"])
        self._tallies = Tallies(stages.here, data)
        self._scale = LossScale(self._task, auxiliary, data, everywhere)
        self._executor = Executor(
            stages=stages.here,
            pipeline=pipeline,
            boundaries=Boundaries(stages.outlines, converted),
            topology=topology,
            task=self._task,
            auxiliary_losses=auxiliary,
            tallies=self._tallies,
            gradients=self._gradients,
            statistics=Statistics({}, gated=False, group=everywhere, device=topology.device),
            draws=self._draw(seed, microbatch_size),
            autocast=autocast,
            unsplittable=unsplittable,
            handlers=stages.schedule.handlers,
        )
        self._clipper = Clipper(
            trained,
            {**task.coefficients, **auxiliary.coefficients},
            topology,
            max_norm,
            GradientNorm(2.0),
            views=ownership.views,
            elsewhere=self._ties.elsewhere,
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Trained parameters of this rank, some of which may be DTensors."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def step(self, pack: Sequence[Microbatch]) -> StepResult:
        """Run forward and backward over the microbatches of this rank, sum gradients over ranks, and clip them.

        The loss of a step is the mean over the samples of all ranks and microbatches, weighted by the task. Collective
        over all ranks; all ranks need the same number of microbatches.

        Args:
            pack: microbatches on the device, with all positions of each sample.

        Returns:
            Loss, its terms and the norm of all gradients, as tensors on the device, equal on all ranks.

        Raises:
            TrainingError: the pack is empty, ranks have different numbers of microbatches in the first step, or
                :meth:`end_step` was not called after the last step.
        """
        if not pack:
            raise TrainingError("step() got an empty pack; give each rank the same number of microbatches, not zero")
        if not self._ended:
            raise TrainingError(
                "step() was called twice without end_step(), so gradients of two steps would be added; call end_step() "
                "after the optimizer's step, and give step() all microbatches of a step"
            )
        if self._count == 0:
            self._check_counts(len(pack))
        self._ended = False
        own = self._own(pack)
        scale = self._scale.begin(own)
        loss = self._executor.run(self._count, own, scale)
        self._gradients.finish()
        loss = self._scale.settle(loss, self._gradients)
        self._count += 1
        return self._clipper.clip(loss, sum(self._task.count(microbatch) for microbatch in own))

    def end_step(self) -> None:
        """Finish a step, after the step of the optimizer: copy tied parameters, adapt routers, and drop the gradients.

        Collective over the ranks that share tied parameters or counts.
        """
        self._ties.copy_values()
        self._tallies.adapt(torch.ones((), dtype=torch.bool, device=self.topology.device))
        self._gradients.reset()
        self._ended = True

    def evaluate(self, pack: Sequence[Microbatch], outputs: Outputs) -> None:
        """Run the model without gradients; collective over the ranks of the pipeline.

        Args:
            pack: microbatches on the device.
            outputs: called with the outputs of the model and the microbatch, on the ranks that have the last stage.
        """
        self._executor.evaluate(self._own(pack), outputs)

    def _own(self, pack: Sequence[Microbatch]) -> Pack:
        return [microbatch if self._split is None else self._split(microbatch) for microbatch in pack]

    def _check_counts(self, count: int) -> None:
        """Check that all ranks have the same number of microbatches; only in the first step, because the host waits."""
        if self.topology.world_size == 1:
            return
        bounds = torch.tensor([count, -count], device=self.topology.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        most, least = bounds[0].item(), -bounds[1].item()
        if most != least:
            raise TrainingError(
                f"step() got {count} microbatch(es) on this rank, and {least} to {most} over all ranks; give each rank "
                "the same number, in each step"
            )

    def _draw(self, seed: int, size: int) -> MicrobatchSeeds:
        # Ranks have disjoint ranges of sample numbers, whatever the number of microbatches.
        first = self.topology.data_parallel_rank * 2**32
        return MicrobatchSeeds(seed, first, size, self.topology.coordinate["cp"])

    def _bind(
        self,
        stages: Stages,
        requested: Mapping[str, str],
        dtype: torch.dtype | None,
        outcomes: Sequence[tuple[str, Applied]],
        registry: Registry,
    ) -> None:
        device = self.topology.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        judge = Judge((), registry, Circumstances(self.topology.sizes, device.type, capability))
        stored = next((p.dtype for stage in stages.here.values() for p in stage.parameters()), torch.float32)
        holders = [pair for stage in stages.here.values() for pair in stage.named_modules()]
        name = str(dtype or stored).removeprefix("torch.")
        outside = [module for _, one in outcomes for module in one.outside_graph]
        kernels = bind_kernels(holders, registry, requested, device.type, name, judge.verdicts, outside_graph=outside)
        refuse_unused(requested, kernels, ops_elsewhere(stages.full, {place for place, _ in holders}))
        for _, one in outcomes:
            if one.check_kernels is not None:
                one.check_kernels()


def _check_stages(stages: Stages, registry: Registry) -> None:
    """Check the order of the strategies, and that each axis over which layers are split is used by a strategy.

    Raises:
        BuildError: the stages are allocated already, a strategy came too late, or an axis is unused.
    """
    if stages.allocated:
        raise BuildError("another OwnLoop() has allocated these stages; build further ones by build_stages()")
    declared = (entry.spec for entry in registry.entries("strategy"))
    known = {spec.name: spec for spec in declared if isinstance(spec, StrategySpec)}
    names = [name for name, _ in next(iter(stages.applied.values()))]
    specs = [known[name] for name in names if name in known]
    for earlier, later in pairwise(specs):
        if _place(later) < _place(earlier):
            raise BuildError(
                f"strategy '{later.name}' was applied after '{earlier.name}'; apply '{later.name}' first, as a job does"
            )
    used = {axis for spec in specs for axis in spec.axes}
    for axis in ("tp", "cp", "ep"):
        # The axes of a strategy that is in no plugin are unknown.
        if len(specs) == len(names) and stages.topology.sizes[axis] > 1 and axis not in used:
            raise BuildError(
                f"mesh.{axis} is {stages.topology.sizes[axis]}, but no strategy of these stages uses that axis; apply "
                "a strategy for it, or set it to 1"
            )


def _place(spec: StrategySpec) -> tuple[int, int]:
    return ANCHORS.index(spec.anchor), POSITIONS.index(spec.position)


class _LossOfTask:
    """Wrapper of a task that gives it the interface that the executor needs.

    Attributes:
        late: whether the weight of the loss depends on outputs.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.late = isinstance(task, WeighsOutputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def weigh(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its weight in this microbatch."""
        if not isinstance(self._task, WeighsOutputs):
            return self._task.weights(microbatch)
        (term,) = self._task.coefficients
        return {term: self._task.weight(outputs, microbatch)}


def _positions(task: Task, topology: Topology) -> Callable[[Microbatch], Microbatch] | None:
    """Function that selects this rank's positions of a microbatch; ``None`` if a rank has all positions."""
    ranks = topology.sizes["cp"]
    if ranks == 1:
        return None
    if not isinstance(task, SplitsPositions):
        raise BuildError(
            f"mesh.cp is {ranks}, but the task {type(task).__name__} needs all positions of a sample on one rank: it "
            "has no split_positions(); remove cp, or give the task this method"
        )
    share = ZigzagPositions(ranks, topology.coordinate["cp"])
    return lambda microbatch: task.split_positions(microbatch, share)
