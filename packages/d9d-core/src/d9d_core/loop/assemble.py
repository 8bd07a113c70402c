"""Putting a model stage together on the meta device: nothing is allocated, everything is decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d9d_core.config.base import PluginConfig
from d9d_core.config.job import JobConfig
from d9d_core.errors import BuildError
from d9d_core.loop.kernels import KernelChoice, bind_kernels
from d9d_core.loop.selection import Selection
from d9d_core.plugin.capabilities import Chosen, Circumstances, Judge
from d9d_core.plugin.records import ConfiguredSpec
from d9d_core.plugin.registry import Registry
from d9d_core.protocols import Applied, PeftMethod, Stage, Strategy
from d9d_core.topology.mesh import Topology


@dataclass(frozen=True)
class Assembly:
    """A stage on the meta device and how it came about.

    Attributes:
        stage: the model, with all strategies applied.
        kernels: what its ops run with.
        applied: each strategy and what it changed, in order of application.
        peft: the fine-tuning method, to be merged before export.
        trainable: names of the parameters that train.
    """

    stage: nn.Module
    kernels: Sequence[KernelChoice]
    applied: Sequence[tuple[Chosen, Applied]]
    peft: PeftMethod | None
    trainable: frozenset[str]


def assemble(
    job: JobConfig, selection: Selection, registry: Registry, topology: Topology, circumstances: Circumstances
) -> Assembly:
    """Build the stage, bind kernels, inject the fine-tuning method, apply strategies in the order of their anchors.

    Raises:
        BuildError: a part asked for has no effect or cannot run.
    """
    with torch.device("meta"), _default_dtype(getattr(torch, job.precision.parameters)):
        stage = build_part(selection.model, job.model, Stage())
    assert isinstance(stage, nn.Module)
    compute = job.precision.autocast or job.precision.parameters
    judge = Judge(selection.all(), registry, circumstances)
    kernels = bind_kernels(stage, registry, job.kernels, topology.device.type, compute, judge.verdicts)
    peft: PeftMethod | None = None
    trainable = frozenset(name for name, _ in stage.named_parameters())
    if selection.peft and job.peft:
        peft = build_part(selection.peft, job.peft)
        assert peft is not None
        with torch.device("meta"), _default_dtype(getattr(torch, job.precision.parameters)):
            trainable = _inject(peft, selection.peft, stage)
    applied = []
    for chosen, config in selection.strategies:
        strategy: Strategy = build_part(chosen, config)
        outcome = strategy.apply(stage, topology)
        if not outcome.modules:
            raise BuildError(
                f"{chosen.where}: strategy {chosen.entry} matched no module of the model; remove it or change it"
            )
        applied.append((chosen, outcome))
    return Assembly(stage, kernels, applied, peft, trainable)


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
