"""Workload of a job in any layout: model, lengths, dtypes and optimizer. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import or_
from typing import Any

from d9d_core.components.instantiate import instantiate
from d9d_core.config import PartConfig, PluginConfig, ScheduleConfig
from d9d_core.cost import AdapterCosts, OptimizerCost, Share, Simulate, StageCost, StrategyCost
from d9d_core.data import sample_lengths
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.inner import choose
from d9d_core.job_file.job import JobConfig, Mesh
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_core.plugin import KernelSpec, ModelSpec, OptimizerSpec, ScheduleSpec, StrategySpec, ViewSpec
from d9d_core.program.validation import placement
from d9d_core.registry.registry import REFERENCE, Registry
from d9d_core.schedule import Program
from d9d_engine.compose.answers import asked, best
from d9d_engine.costs.tuning import adapter_costs, tuned

from d9d_planner.costs.context import shared
from d9d_planner.costs.update import Updates
from d9d_planner.layout import DataGroups, Layout
from d9d_planner.live import Moment, moments
from d9d_planner.options import Options

_WIDTHS = {"float32": 4, "bfloat16": 2}


class Workload:
    """Workload of a job, from which the costs of each layout are computed.

    Args:
        job: job to predict.
        registry: registry of the plugins.
        views: name -> view of the mesh.

    Attributes:
        notes: texts about costs that are unknown, and the assumptions used instead.
        tallies: cache of stage times that several layouts share.

    Raises:
        JobError: the model or its fine-tuning method has no cost description.
    """

    def __init__(self, job: JobConfig, registry: Registry, views: Mapping[str, ViewSpec]) -> None:
        self.job, self.registry, self.views = job, registry, views
        self.notes: list[str] = []
        model = choose(registry, "model", "model", job.model)
        spec = model.spec
        if not isinstance(spec, ModelSpec) or spec.cost is None:
            raise JobError(
                f"model: {model.entry} has no cost description for a prediction; its plugin must give ModelSpec.cost"
            )
        self._adapters: AdapterCosts | None = None if job.peft is None else adapter_costs(job.peft, registry)
        self._cost: Any = spec.cost.load()
        self._stages: dict[Any, list[StageCost]] = {}
        self._programs: dict[Any, Sequence[Program]] = {}
        self._rhythms: dict[Any, tuple[list[int], list[list[Moment]]]] = {}
        self._effects: dict[tuple[int, ...], tuple[tuple[PluginConfig, ...], StrategyCost]] = {}
        self._groups: dict[Mesh, DataGroups] = {}
        self._backends: dict[tuple[str, str, bool, str], str] = {}
        self.tallies: dict[Any, Any] = {}

    @cached_property
    def options(self) -> Options:
        """Strategies and schedules for other layouts of the job."""
        return Options(self.job, self.registry)

    @cached_property
    def length(self) -> int:
        """Number of positions of a sample: the largest in the data, or ``max_positions`` of the model if unknown."""
        lengths = sample_lengths(self.job.data)
        if lengths is not None and lengths.most is not None:
            if lengths.fixed is None:
                self.notes.append(f"samples have up to {lengths.most:,} positions; all are counted with this length")
            return lengths.most
        length = getattr(self.job.data, "sequence_length", None)
        if isinstance(length, int):
            return length
        longest = getattr(self.job.model, "max_positions", None)
        if not isinstance(longest, int):
            raise JobError(
                "the length of samples is unknown; set data.sequence_length or model.max_positions, whichever exists"
            )
        self.notes.append(f"the data does not say how long samples are; counted with max_positions, {longest:,}")
        return longest

    @cached_property
    def _multiples(self) -> dict[str, int]:
        """Field of a dataset in the job file -> number that divides all its sequence lengths, if known."""
        evaluation = self.job.evaluation
        datasets = {"data": self.job.data}
        datasets |= (
            {f"evaluation {name}".rstrip(): data for name, data in evaluation.datasets.items()} if evaluation else {}
        )
        found = ((where, sample_lengths(data)) for where, data in datasets.items())
        return {where: lengths.multiple for where, lengths in found if lengths is not None}

    def _check_lengths(self, mesh: Mesh) -> None:
        """Check that sequence lengths of training and evaluation can be split over ``cp`` and ``tp``.

        Raises:
            JobError: a length cannot be split; see :mod:`d9d_engine.compose.parts.sample_lengths`.
        """
        ranks = math.lcm(2 * mesh.cp if mesh.cp > 1 else 1, mesh.tp * mesh.cp)
        for where, multiple in self._multiples.items():
            if multiple % ranks:
                raise JobError(
                    f"mesh.tp {mesh.tp} and mesh.cp {mesh.cp} need sequence lengths that are multiples of {ranks}, but "
                    f"{where} has multiples of {multiple}; use other sizes of the mesh, or other lengths"
                )

    @cached_property
    def texts(self) -> int:
        """Number of texts per sample, each a row of a microbatch; two for a pair of preferred and rejected answers."""
        lengths = sample_lengths(self.job.data)
        return 1 if lengths is None else lengths.texts

    @cached_property
    def parameter_width(self) -> int:
        """Bytes of a stored parameter element."""
        return _WIDTHS[self.job.precision.parameters]

    @cached_property
    def gradient_width(self) -> int:
        """Bytes of a stored gradient element."""
        return _WIDTHS[self.job.gradients.accumulate or self.job.precision.parameters]

    @cached_property
    def optimizer(self) -> OptimizerCost:
        return self._optimizer(self.job.optimizer, self.parameter_width)

    def _optimizer(self, config: PluginConfig, width: int) -> OptimizerCost:
        chosen = choose(self.registry, "optimizer", "optimizer", config)
        if isinstance(chosen.spec, OptimizerSpec) and chosen.spec.cost is not None:
            inner = (self._optimizer,) if chosen.spec.composite else ()
            cost: OptimizerCost = chosen.spec.cost.load()(config, width, *inner)
            return cost
        self.notes.append(f"optimizer {chosen.entry} has no cost description; counted as one with two moments")
        return OptimizerCost(state=2 * width, traffic=7 * width)

    def strategy(self, layout: Layout) -> StrategyCost:
        """Combined cost effects of all strategies of a layout."""
        mesh = layout.mesh
        alone = mesh.dp_shard == mesh.cp == mesh.pp == 1
        key = (alone, *map(id, layout.parallel))
        if key not in self._effects:
            effect = reduce(or_, (self._effect(config) for config in layout.parallel), StrategyCost())
            if alone and effect.in_place:
                effect = replace(effect, gathers="never", reduces="last")
            self._effects[key] = layout.parallel, effect  # keeps the objects with these ids alive
        return self._effects[key][1]

    def _effect(self, config: PluginConfig) -> StrategyCost:
        spec = self.registry.find("strategy", config.selector).spec
        if isinstance(config, PartConfig) and config.match:
            note = f"strategy {config.selector} with 'match' is counted as if it acted on the whole model"
            if note not in self.notes:  # this function runs for each layout, and one note is enough
                self.notes.append(note)
        if not isinstance(spec, StrategySpec) or spec.cost is None:
            return StrategyCost()
        effect: StrategyCost = spec.cost.load()(config)
        return effect

    def updates(self, layout: Layout) -> Updates:
        """Costs of the optimizer's updates in a layout."""
        groups, shards = self.groups(layout), self.strategy(layout).shards
        sizes = (groups.shards.size, groups.expert_shards.size) if shards else (1, 1)
        return Updates(self.optimizer, *sizes, layout.mesh.tp)

    def groups(self, layout: Layout) -> DataGroups:
        mesh = layout.mesh
        if mesh not in self._groups:
            self._groups[mesh] = DataGroups.of(mesh, self.views)
        return self._groups[mesh]

    def compute_width(self, effect: StrategyCost) -> int:
        """Bytes of an element of the dtype in which forward and backward compute."""
        if self.job.precision.autocast is not None:
            return _WIDTHS[self.job.precision.autocast]
        return effect.compute_width or self.parameter_width

    def stages(self, layout: Layout, memory: float, count: int | None = None) -> list[StageCost]:
        """Costs of all stages, for one microbatch on one rank.

        Args:
            layout: layout of the job.
            memory: memory of the device in bytes.
            count: number of stages; by default the schedule's.

        Raises:
            D9dError: the model does not support the layout.
        """
        effect, mesh = self.strategy(layout), layout.mesh
        self._check_lengths(mesh)
        share = Share(
            layout.microbatch * self.texts,
            self.length,
            mesh.tp,
            mesh.cp,
            mesh.ep,
            self.compute_width(effect),
            effect.compiled,
            memory,
            self._backend,
        )
        count = count or len(self.hosts(layout))
        given = layout.pipeline.layers if isinstance(layout.pipeline, ScheduleConfig) else None
        context = effect.context if mesh.cp > 1 else None
        key = (share, count, given, context)
        if key not in self._stages:
            costs = [self._cost(self.job.model, Stage(index, count, given), share) for index in range(count)]
            if context is not None:
                costs = [shared(cost, context, mesh.cp) for cost in costs]
            if self._adapters is not None:
                costs = tuned(costs, self._adapters, share)
            same: dict[StageCost, StageCost] = {}
            # Stages that differ only in layer names become one object, so that comparisons are cheap.
            self._stages[key] = [same.setdefault(cost, cost) for cost in map(_unnamed, costs)]
        return self._stages[key]

    def _backend(self, signature: OpSignature) -> str:
        """Name of the backend that the job would use for an op, if its GPUs satisfy the requirements of all plugins."""
        request = self.job.kernels.get(signature.op)
        if isinstance(request, str):
            return request
        key = signature.op, signature.dtype, signature.compiled, repr(sorted(signature.static.items()))
        if key not in self._backends:
            entries = self.registry.kernels(signature.op)
            answers = {one: asked(one.spec, signature) for one in entries if isinstance(one.spec, KernelSpec)}
            chosen = best(answers)
            self._backends[key] = REFERENCE if chosen is None else chosen.spec.key.partition(".")[2]
        return self._backends[key]

    def programs(self, layout: Layout, microbatches: int) -> Sequence[Program]:
        """Programs of all pipeline ranks for a number of microbatches, without validation.

        Raises:
            BuildError: the schedule does not support this number.
        """
        assert layout.pipeline is not None
        key = (layout.pipeline.model_dump_json(), layout.mesh.pp, microbatches)
        if key not in self._programs:
            schedule = instantiate(choose(self.registry, "schedule", "pipeline", layout.pipeline), layout.pipeline)
            try:
                self._programs[key] = schedule(layout.mesh.pp, microbatches)
            except ValueError as error:
                raise BuildError(f"pipeline: {error}") from error
        return self._programs[key]

    def hosts(self, layout: Layout) -> list[int]:
        """Stage -> pipeline rank that runs it."""
        return self._steady_schedule(layout)[0]

    def moments(self, layout: Layout) -> list[list[Moment]]:
        """States in which each pipeline rank may reach its peak memory."""
        return self._steady_schedule(layout)[1]

    def _steady_schedule(self, layout: Layout) -> tuple[list[int], list[list[Moment]]]:
        """Hosts and memory states of a layout, from a few microbatches, because more microbatches repeat the states."""
        if layout.pipeline is None:
            return [0], [[Moment(((0, 1),), 0, frozenset((0,) if layout.microbatches > 1 else ()))]]
        count = min(layout.microbatches, steady(layout.mesh.pp))
        key = (layout.pipeline.model_dump_json(), layout.mesh.pp, count)
        if key not in self._rhythms:
            programs = self.programs(layout, count)
            found = {stage: rank for rank, held in enumerate(placement(programs)) for stage in held}
            hosts = [found[stage] for stage in range(len(found))]
            self._rhythms[key] = hosts, [moments(program) for program in programs]
        return self._rhythms[key]

    def simulator(self, layout: Layout) -> Simulate:
        """Simulator of the layout's schedule.

        Raises:
            JobError: the schedule cannot be simulated.
        """
        assert layout.pipeline is not None
        entry = self.registry.find("schedule", layout.pipeline.selector)
        if not isinstance(entry.spec, ScheduleSpec) or entry.spec.simulate is None:
            raise JobError(f"pipeline: schedule {entry} has no simulator; its plugin must give ScheduleSpec.simulate")
        found: Simulate = entry.spec.simulate.load()
        return found


def steady(ranks: int) -> int:
    """Number of microbatches after which each rank's actions repeat."""
    return 2 * ranks


def _unnamed(cost: StageCost) -> StageCost:
    """Copy of a stage's cost without names of blocks."""
    return replace(cost, blocks=tuple(replace(block, names=()) for block in cost.blocks))
