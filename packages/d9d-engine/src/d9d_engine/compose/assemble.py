"""Assembly of this rank's stages on the meta device, without allocating memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from d9d_core.components.contract import check_returned, check_trainable
from d9d_core.components.instantiate import instantiate
from d9d_core.config import PartConfig
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.model import SplitsSequence
from d9d_core.peft import PeftMethod
from d9d_core.plugin import StrategySpec
from d9d_core.program.placement import Pipeline, plan_pipeline
from d9d_core.registry.capabilities import Chosen
from d9d_core.strategy import Applied, Communication, Meetings, Reducer, Strategy
from d9d_core.traits import Divisible, PipelineStage
from d9d_weights.graph.graph import specs_of
from d9d_weights.sharding.collectives import all_gather_objects
from d9d_weights.sharding.model_tensors import model_tensors
from d9d_weights.sharding.stage_holders import StageHolders
from torch import nn

from d9d_engine.compose.initialise import Undrawn
from d9d_engine.compose.joined_stages import JoinedStages, joined_stages
from d9d_engine.compose.kernels import KernelChoice, bind_kernels, holders_alike, ops_elsewhere, slot_facts
from d9d_engine.compose.parts.cuda_graphs import check_cuda_graphs
from d9d_engine.compose.parts.data import check_documents, documents_of
from d9d_engine.compose.parts.matches import check_matches, format_of_compute
from d9d_engine.compose.parts.sample_lengths import check_lengths
from d9d_engine.compose.root import Root
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.ownership import Ownership, check_replicas, settle
from d9d_engine.step.replicas import joined_meetings


@dataclass(frozen=True)
class Assembly:
    """This rank's stages on the meta device, after all strategies.

    Attributes:
        pipeline: all stages and the ranks that run them.
        stages: index -> stage of this rank, with all strategies applied.
        full_model: all stages of the model as one module; stages of other ranks stay on the meta device.
        outlines: all stages but the last, on the meta device and without strategies; used to infer boundary tensors.
        kernels: chosen backends of the ops.
        applied: strategies and their effects, in order of application.
        reducers: stage -> reducers to notify when a backward starts.
        peft: fine-tuning method, to be merged before export.
        trainable: names of the trained parameters.
        ownership: owner of each gradient reduction.
        shared: parameter -> stages that have it, for parameters of several stages.
        injected: names of the tensors that the fine-tuning method added.
        tuned: names of the tensors that the fine-tuning method added or selected for training, also in a frozen model.
        communication: stage -> strategies, each with its function that lists its collectives, or ``None``.
        ops_elsewhere: ops that strategies may have put into stages of other ranks.
    """

    pipeline: Pipeline
    stages: Mapping[int, nn.Module]
    full_model: nn.Module
    outlines: Sequence[nn.Module]
    kernels: Sequence[KernelChoice]
    applied: Sequence[tuple[Chosen, Applied]]
    reducers: Mapping[int, Sequence[Reducer]]
    peft: PeftMethod | None
    trainable: frozenset[str]
    ownership: Ownership
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    injected: frozenset[str] = frozenset()
    tuned: frozenset[str] = frozenset()
    communication: Mapping[int, Sequence[tuple[Chosen, Communication | None]]] = field(default_factory=dict)
    ops_elsewhere: frozenset[str] = frozenset()

    @property
    def model(self) -> nn.Module:
        """Stages of this rank as one module."""
        return joined_stages(list(self.stages.values()))

    @property
    def all_stages(self) -> list[nn.Module]:
        """All stages of the model, in order."""
        return list(self.full_model.stages) if isinstance(self.full_model, JoinedStages) else [self.full_model]

    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters of the full model, on every rank, so that rules of an optimizer match the same names.

        Parameters of other ranks are on the meta device.
        """
        here = dict(self.model.named_parameters())
        everything = {name: here.get(name, parameter) for name, parameter in self.full_model.named_parameters()}
        return {name: parameter for name, parameter in everything.items() if name in self.trainable}

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the parameters in host memory."""
        return frozenset(name for _, applied in self.applied for name in applied.on_host)

    @property
    def meetings(self) -> list[Meetings]:
        """Objects by which strategies make the replicas equal, if replicas take their own optimizer steps."""
        return [applied.meetings for _, applied in self.applied if applied.meetings is not None]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype to which strategies convert parameters and inputs; ``None`` without such a strategy."""
        converted = [applied.compute_dtype for _, applied in self.applied if applied.compute_dtype is not None]
        return converted[-1] if converted else None

    def stage_holders(self, topology: Topology) -> StageHolders | None:
        """Map from tensors to pipeline ranks that hold them; ``None`` without a pipeline. Collective over ``pp``."""
        if self.pipeline.ranks == 1:
            return None
        group = topology.axes_group("pp")
        assert group is not None
        holders: dict[str, int] = {}
        for host, stage in zip(self.pipeline.hosts, self.all_stages, strict=True):
            holders = dict.fromkeys(model_tensors(stage), host) | holders
        return StageHolders(specs_of(model_tensors(self.full_model)), holders, group, topology.device)

    def unsplittable(self) -> frozenset[str]:
        """Names of the modules whose backward cannot be split, because they are checkpointed or compiled."""
        return frozenset(
            name
            for chosen, applied in self.applied
            if isinstance(chosen.spec, StrategySpec) and chosen.spec.anchor in _UNSPLITTABLE
            for name in applied.modules
        )


#: Anchors of strategies after which the backward of a module cannot be split.
_UNSPLITTABLE = ("checkpointing", "compile")


def assemble(root: Root[BaseJob, Parts], trains: bool = True) -> Assembly:
    """Assemble the stages: build them, inject the fine-tuning method, apply strategies in order, bind kernels.

    Stages of other ranks are built on the meta device too, because all ranks must agree about names and shapes.
    Collective over all ranks if a strategy communicates.

    Args:
        root: the job with its plugin records and the topology of this process.
        trains: false for a frozen model, such as a reference model.

    Raises:
        JobError: a mesh axis does not divide a size of the model, or the layout does not fit the data.
        BuildError: a requested component has no effect or cannot run.
    """
    job, selection, topology = root.job, root.selection, root.topology
    pipeline = plan_pipeline(job, selection)
    everything = build_stages(job, selection, pipeline)
    full_model = joined_stages(everything)
    check_divisibility(full_model, job.mesh.sizes())
    check_documents(job, everything)
    check_matches(full_model, selection.strategies)
    peft: PeftMethod | None = None
    trainable = frozenset(name for name, parameter in full_model.named_parameters() if parameter.requires_grad)
    tuned = frozenset[str]()
    before = model_tensors(full_model).keys()
    if selection.peft and job.peft:
        peft = instantiate(selection.peft, job.peft)
        assert peft is not None
        with torch.device("meta"), Undrawn(), _default_dtype(getattr(torch, job.precision.parameters)):
            tuned = trainable = _inject(peft, selection.peft, full_model)
    if not trains:
        trainable = frozenset()
    for stage in everything:  # each stage has its own copy of a shared parameter
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(name in trainable)
    injected = frozenset(model_tensors(full_model).keys() - before)
    shared = shared_names(everything)
    stages = {index: everything[index] for index in pipeline.stages_of(topology.coordinate["pp"])}
    # Boundary tensors must be inferred alike on all ranks, so strategies do not change these copies.
    outlines = [deepcopy(stage) if index in stages else stage for index, stage in enumerate(everything[:-1])]
    kinds = {name: type(module) for name, module in full_model.named_modules()}  # FSDP2 changes a module's class
    facts = slot_facts(full_model)
    applied = []
    reducers: dict[int, list[Reducer]] = {index: [] for index in stages}
    communication: dict[int, list[tuple[Chosen, Communication | None]]] = {index: [] for index in stages}
    checks = []
    for chosen, config in selection.strategies:
        outcomes = _apply(chosen, config, stages, topology, len(everything) > 1, kinds)
        for index, outcome in outcomes.items():
            reducers[index] += outcome.reducers
            communication[index].append((chosen, outcome.collectives))
            checks.append(outcome.check_kernels)
        applied.append((chosen, merged(list(outcomes.values()))))
        split_sequences(outlines, applied[-1][1].sequence_ranks)
    if trains:
        check_lengths(job, applied)
    check_cuda_graphs(applied, pipeline, root.resolution.judge.circumstances.device)
    compute = format_of_compute(job.precision, stages.values(), applied)
    model = joined_stages(list(stages.values()))
    here = {name for name, _ in model.named_modules()}
    compiled, checkpointed = (changed_modules(anchor, applied, kinds, here) for anchor in ("compile", "checkpointing"))
    kernels = bind_kernels(
        holders_alike(full_model, facts, kinds, here),
        root.registry,
        job.kernels,
        topology.device.type,
        compute,
        root.resolution.judge.verdicts,
        job.deterministic,
        compiled=compiled,
        outside_graph=alike_modules({name for _, outcome in applied for name in outcome.outside_graph}, kinds, here),
        documents=documents_of(job),
        checkpointed=checkpointed,
        storing=alike_modules({name for _, outcome in applied for name in outcome.storing}, kinds, here),
    )
    for check in checks:
        if check is not None:
            check()
    outcomes_by_name = [(f"{chosen.where} ({chosen.spec.name})", outcome) for chosen, outcome in applied]
    trained = [name for name, _ in model.named_parameters() if name in trainable]
    ownership = settle(trained, topology, outcomes_by_name)
    ownership = check_replicas(dict(model.named_parameters()), ownership, topology, outcomes_by_name)
    return Assembly(
        pipeline,
        stages,
        full_model,
        outlines,
        kernels,
        applied,
        reducers,
        peft,
        trainable,
        ownership,
        shared,
        injected,
        injected | tuned,
        communication,
        ops_elsewhere(full_model, here),
    )


def build_stages(job: BaseJob, selection: Parts, pipeline: Pipeline) -> list[nn.Module]:
    """Build all stages of the model on the meta device, without strategies.

    Raises:
        BuildError: the model cannot be split into these stages, or two stages have the same persistent buffer.
    """
    with torch.device("meta"), Undrawn(), _default_dtype(getattr(torch, job.precision.parameters)):
        stages: list[nn.Module] = [instantiate(selection.model, job.model, stage) for stage in pipeline.stages]
    if len(stages) == 1:
        return stages
    seen: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if not isinstance(stage, PipelineStage):
            kind = type(stage).__name__
            raise BuildError(
                f"model {selection.model.entry}: {kind} does not declare a stage's outputs; give it boundary()"
            )
        parameters = dict(stage.named_parameters())
        for name in model_tensors(stage).keys() - parameters.keys():
            if name in seen:
                raise BuildError(
                    f"model {selection.model.entry}: stages {seen[name]} and {index} both have the buffer '{name}', "
                    "so a checkpoint could keep only one; give it to one stage, or make it non-persistent"
                )
            seen[name] = index
    return stages


def shared_names(stages: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Parameters in several stages, such as a tied embedding: name -> stages."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            found.setdefault(name, []).append(index)
    return {name: tuple(holders) for name, holders in found.items() if len(holders) > 1}


def split_sequences(outlines: Iterable[nn.Module], ranks: int) -> None:
    """Let outlines return hidden states of one rank's positions only, if a strategy splits the sequence.

    Args:
        outlines: stages on the meta device, see :class:`Assembly`.
        ranks: number of ranks over which the sequence is split.
    """
    for outline in outlines:
        if ranks > 1 and isinstance(outline, SplitsSequence):
            outline.split_sequence(ranks)


def changed_modules(
    anchor: str, applied: Sequence[tuple[Chosen, Applied]], kinds: Mapping[str, type[nn.Module]], here: Set[str]
) -> frozenset[str]:
    """Names of the modules that strategies at an anchor changed, such as the modules that ``compile`` compiled.

    For stages of other ranks, modules of the same classes are assumed to change, so that all ranks plan alike.

    Args:
        anchor: anchor of the strategies.
        applied: strategies and their effects on this rank's stages.
        kinds: class of each module of the full model, before strategies.
        here: names of the modules of this rank's stages.
    """
    strategies = [(chosen.spec, outcome) for chosen, outcome in applied if isinstance(chosen.spec, StrategySpec)]
    return alike_modules(
        {name for spec, outcome in strategies if spec.anchor == anchor for name in outcome.modules}, kinds, here
    )


def alike_modules(names: Set[str], kinds: Mapping[str, type[nn.Module]], here: Set[str]) -> frozenset[str]:
    """Names of the given modules, and of all modules of the same classes in the stages of other ranks.

    Args:
        names: names of modules in this rank's stages.
        kinds: class of each module of the full model, before strategies.
        here: names of all modules of this rank's stages.
    """
    alike = {kinds[name] for name in names if name in kinds}
    return frozenset(names | {name for name, kind in kinds.items() if name not in here and kind in alike})


def _apply(
    chosen: Chosen,
    config: Any,
    stages: Mapping[int, nn.Module],
    topology: Topology,
    several: bool,
    names: Collection[str] = (),
) -> dict[int, Applied]:
    """Apply a strategy to each stage of this rank; it must change a module in at least one stage of the pipeline."""
    strategy: Strategy = instantiate(chosen, config)
    outcomes = {index: strategy.apply(stage, topology) for index, stage in stages.items()}
    for outcome in outcomes.values():
        check_returned(chosen, "apply()", outcome, Applied)
    if several and topology.simulated:  # other ranks' stages are not simulated; further checks run when the job starts
        _refuse_unmatched_parts(config, outcomes.values(), names)
        return outcomes
    if not refuse_unmatched(outcomes.values(), topology, several):
        raise BuildError(
            f"{chosen.where}: strategy {chosen.entry} changes no module of the model: its patterns match none, or the "
            "matched modules have no parameters of their own (a tied weight belongs to the embedding); change its "
            "patterns, or remove it"
        )
    return outcomes


def _refuse_unmatched_parts(config: Any, outcomes: Iterable[Applied], names: Collection[str]) -> None:
    """Raise if a pattern in a strategy's field ``match`` matches no module of any stage."""
    for pattern in config.match if isinstance(config, PartConfig) else ():
        reasons = [why for one in outcomes if (why := one.unmatched.get(f"match {pattern}"))]
        if reasons and not any(fnmatchcase(name, pattern) for name in names if name):
            raise BuildError(reasons[0])


def refuse_unmatched(outcomes: Iterable[Applied], topology: Topology, several: bool) -> bool:
    """Refuse settings of a strategy that have no match in any stage. Collective over ``pp`` with several stages.

    Args:
        outcomes: effects of the strategy on this rank's stages.
        topology: topology of this process.
        several: whether the model has several stages.

    Returns:
        Whether the strategy changed a module of any stage.

    Raises:
        BuildError: a setting has no match.
    """
    outcomes = list(outcomes)
    changed = any(outcome.modules for outcome in outcomes)
    first, *others = (outcome.unmatched for outcome in outcomes)
    unmatched = {what: why for what, why in first.items() if all(what in other for other in others)}
    if several and topology.is_distributed:
        everywhere = all_gather_objects([changed, list(unmatched)], topology.axes_group("pp"))
        changed = any(there for there, _ in everywhere)
        unmatched = {what: why for what, why in unmatched.items() if all(what in names for _, names in everywhere)}
    for why in unmatched.values():
        raise BuildError(why)
    return changed


def merged(outcomes: Sequence[Applied]) -> Applied:
    """Merge the results of one strategy's ``apply`` for all stages of this rank."""
    if len(outcomes) == 1:
        return outcomes[0]
    return Applied(
        modules=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.modules)),
        gradients=tuple(dict.fromkeys(owner for outcome in outcomes for owner in outcome.gradients)),
        views={name: view for outcome in outcomes for name, view in outcome.views.items()},
        reducers=tuple(reducer for outcome in outcomes for reducer in outcome.reducers),
        compute_dtype=next((o.compute_dtype for o in outcomes if o.compute_dtype is not None), None),
        on_host=frozenset(name for outcome in outcomes for name in outcome.on_host),
        sequence_ranks=max(outcome.sequence_ranks for outcome in outcomes),
        cuda_graphs=any(outcome.cuda_graphs for outcome in outcomes),
        outside_graph=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.outside_graph)),
        storing=tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.storing)),
        notes=tuple(dict.fromkeys(note for outcome in outcomes for note in outcome.notes)),
        resynchronise=_in_turn([o.resynchronise for o in outcomes if o.resynchronise is not None]),
        meetings=joined_meetings([o.meetings for o in outcomes if o.meetings is not None]),
        elastic=next((o.elastic for o in outcomes if o.elastic is not None), None),
    )


def _in_turn(calls: Sequence[Callable[[], None]]) -> Callable[[], None] | None:
    def call() -> None:
        for one in calls:
            one()

    return call if calls else None


def check_divisibility(stage: nn.Module, sizes: Mapping[str, int]) -> None:
    """Check that mesh axes divide the sizes that the model declares.

    Raises:
        JobError: an axis does not divide a size; one line for each such size.
    """
    problems: dict[str, None] = {}
    for module in (module for module in stage.modules() if isinstance(module, Divisible)):
        for axis, things in module.divisibility().items():
            for what, count in things.items():
                if count % sizes[axis]:
                    kind = type(module).__name__
                    cause = f"mesh.{axis} is {sizes[axis]}, which does not divide the {count} {what} of {kind}"
                    problems[f"{cause}; use a divisor of {count}"] = None
    if problems:
        raise JobError("\n".join(problems))


def _inject(peft: PeftMethod, chosen: Chosen, stage: nn.Module) -> frozenset[str]:
    trainable = peft.inject(stage)
    check_trainable(chosen, trainable)
    names = {name for name, _ in stage.named_parameters()}
    if not trainable or not trainable <= names:
        unknown = sorted(trainable - names)[:3]
        what = (
            f"names parameters that the model lacks: {unknown}; return existing names from inject()"
            if unknown
            else "selects no parameter to train; change its patterns"
        )
        raise BuildError(f"{chosen.where}: peft method {chosen.entry} {what}")
    return trainable


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
