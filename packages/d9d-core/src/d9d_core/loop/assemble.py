"""Putting a model stage together on the meta device: nothing is allocated, everything is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d9d_core.config.base import PluginConfig
from d9d_core.config.job import JobConfig
from d9d_core.errors import BuildError, JobError
from d9d_core.loop.kernels import KernelChoice, bind_kernels
from d9d_core.loop.ownership import Ownership, settle
from d9d_core.loop.selection import Selection
from d9d_core.plugin.capabilities import Chosen, Circumstances, Judge
from d9d_core.plugin.records import ConfiguredSpec
from d9d_core.plugin.registry import Registry
from d9d_core.protocols import Applied, PeftMethod, Reducer, Stage, Strategy
from d9d_core.state.model import model_tensors
from d9d_core.topology.mesh import Topology
from d9d_core.traits import Divisible, modules_with


@dataclass(frozen=True)
class Assembly:
    """A stage on the meta device and how it came about.

    Attributes:
        stage: the model, with all strategies applied.
        kernels: what its ops run with.
        applied: each strategy and what it changed, in order of application.
        peft: the fine-tuning method, to be merged before export.
        trainable: names of the parameters that train.
        ownership: who reduces which of their gradients.
        injected: names of the tensors that the fine-tuning method added.
    """

    stage: nn.Module
    kernels: Sequence[KernelChoice]
    applied: Sequence[tuple[Chosen, Applied]]
    peft: PeftMethod | None
    trainable: frozenset[str]
    ownership: Ownership
    injected: frozenset[str] = frozenset()

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """What must know when a backward starts."""
        return tuple(reducer for _, applied in self.applied for reducer in applied.reducers)

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the parameters that live in the host's memory."""
        return frozenset(name for _, applied in self.applied for name in applied.on_host)


def assemble(
    job: JobConfig, selection: Selection, registry: Registry, topology: Topology, circumstances: Circumstances
) -> Assembly:
    """Build the stage, inject the fine-tuning method, apply strategies in the order of their anchors, bind kernels.

    Collective over all ranks, if a strategy communicates.

    Raises:
        BuildError: a part asked for has no effect or cannot run.
    """
    with torch.device("meta"), _default_dtype(getattr(torch, job.precision.parameters)):
        stage = build_part(selection.model, job.model, Stage())
    assert isinstance(stage, nn.Module)
    check_divisibility(stage, job.mesh.sizes())
    peft: PeftMethod | None = None
    trainable = frozenset(name for name, parameter in stage.named_parameters() if parameter.requires_grad)
    before = model_tensors(stage).keys()
    if selection.peft and job.peft:
        peft = build_part(selection.peft, job.peft)
        assert peft is not None
        with torch.device("meta"), _default_dtype(getattr(torch, job.precision.parameters)):
            trainable = _inject(peft, selection.peft, stage)
    injected = frozenset(model_tensors(stage).keys() - before)
    applied = []
    for chosen, config in selection.strategies:
        strategy: Strategy = build_part(chosen, config)
        outcome = strategy.apply(stage, topology)
        if not outcome.modules:
            raise BuildError(
                f"{chosen.where}: strategy {chosen.entry} matched no module of the model; remove it or change it"
            )
        applied.append((chosen, outcome))
    converted = [o.compute_dtype for _, o in applied if o.compute_dtype is not None]
    compute = job.precision.autocast or dtype_name(converted[-1] if converted else None) or job.precision.parameters
    judge = Judge(selection.all(), registry, circumstances)
    kernels = bind_kernels(stage, registry, job.kernels, topology.device.type, compute, judge.verdicts)
    outcomes = [(f"{chosen.where} ({chosen.spec.name})", outcome) for chosen, outcome in applied]
    trained = [name for name, _ in stage.named_parameters() if name in trainable]
    return Assembly(stage, kernels, applied, peft, trainable, settle(trained, topology, outcomes), injected)


def build_part(chosen: Chosen, config: PluginConfig, *arguments: object) -> Any:
    """Call a record's ``build`` reference.

    Raises:
        BuildError: its module cannot be imported.
    """
    assert isinstance(chosen.spec, ConfiguredSpec)
    try:
        build = chosen.spec.build.load()
    except (ImportError, AttributeError) as error:
        kind = chosen.entry.kind.name
        text = f"{chosen.where}: {kind} {chosen.entry}: {chosen.spec.build} failed to load: {error!r}"
        build_error = BuildError(text)
        build_error.origin = error
        raise build_error from error
    return build(config, *arguments)


def check_divisibility(stage: nn.Module, sizes: Mapping[str, int]) -> None:
    """Compare what the model says about its sizes with the mesh.

    Raises:
        JobError: an axis does not divide a size; one line for each such size.
    """
    problems: dict[str, None] = {}
    for module in modules_with(stage, Divisible).values():
        for axis, things in module.divisibility().items():
            for what, count in things.items():
                if count % sizes[axis]:
                    kind = type(module).__name__
                    problems[f"mesh.{axis} is {sizes[axis]}, which does not divide the {count} {what} of {kind}"] = None
    if problems:
        raise JobError("\n".join(problems))


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _inject(peft: PeftMethod, chosen: Chosen, stage: nn.Module) -> frozenset[str]:
    trainable = peft.inject(stage)
    names = {name for name, _ in stage.named_parameters()}
    if not trainable or not trainable <= names:
        unknown = sorted(trainable - names)[:3]
        what = f"names parameters that do not exist: {unknown}" if unknown else "trains no parameter"
        raise BuildError(f"{chosen.where}: peft method {chosen.entry} {what}")
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in trainable)
    return trainable


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
