"""Allocation of an assembled model, with its initial, pretrained and adapter weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.traits import HasAdjacentWeights
from torch import Tensor, nn

from d9d_engine.compose.adapter import start_method
from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.initialise import initialise
from d9d_engine.compose.pretrained import pretrained_weights
from d9d_engine.compose.root import Root
from d9d_engine.step.tied import Ties, find_ties


@dataclass(frozen=True)
class Published:
    """Parts of a pretrained model, other than weights, that an export keeps.

    Attributes:
        files: name -> contents of further files, such as ``generation_config.json``; on the main rank.
        fields: fields of the pretrained model's ``config.json``.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


def start_model(
    root: Root[BaseJob, Parts], assembly: Assembly, accumulate: torch.dtype | None = None
) -> tuple[Published, Ties]:
    """Allocate a rank's stages and load their initial values. Collective over all ranks.

    Args:
        root: the job with its plugin records and the topology of this process.
        assembly: assembled model, on the meta device.
        accumulate: dtype in which gradients of tied parameters are added; by default, the parameter's dtype.

    Returns:
        Files and fields of the pretrained model that an export keeps, and the tied parameters of this rank.

    Raises:
        CheckpointError: pretrained weights or an adapter cannot be read or do not fit, on any rank.
    """
    published = _start_weights(root, assembly)
    ties = find_ties(assembly.stages, assembly.shared, assembly.trainable, assembly.pipeline, root.topology, accumulate)
    ties.copy_values()
    return published, ties


def _start_weights(root: Root[BaseJob, Parts], assembly: Assembly) -> Published:
    job, selection, topology, note = root.job, root.selection, root.topology, root.note
    published = Published()
    with pretrained_weights(
        job, selection, root.registry, assembly.full_model, assembly.injected, topology
    ) as pretrained:
        for stage in assembly.stages.values():
            materialise(stage, assembly.on_host, job.seed, topology.device)
        if pretrained is not None:
            pretrained.load(assembly.model, job, topology, note)
            published = Published(pretrained.others, pretrained.kept)
    start_method(job, selection, assembly, topology, note)
    return published


def materialise(stage: nn.Module, on_host: frozenset[str], seed: int, device: torch.device) -> None:
    """Allocate an assembled stage and initialise its weights, with the same values in every layout.

    Args:
        stage: stage on the meta device.
        on_host: names of the parameters in host memory.
        seed: seed of the job.
        device: device of all other tensors.
    """
    kept = {id(parameter) for name, parameter in stage.named_parameters() if name in on_host}
    tied = _tied(stage)
    adjacent = _adjacent(stage, kept | {id(stage.get_parameter(name)) for name in tied})

    def allocate(tensor: Tensor) -> Tensor:
        if id(tensor) in adjacent:
            return adjacent[id(tensor)].to(device)
        target = torch.device("cpu") if id(tensor) in kept else device
        if type(tensor) not in (Tensor, nn.Parameter):
            return torch.empty_like(tensor, device=target)
        # Do not use empty_like, which for a meta tensor runs in Python and imports sympy.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)

    stage._apply(allocate)  # type: ignore[no-untyped-call]  # noqa: SLF001 - to_empty() has one device for all tensors
    for name, first in tied.items():
        owner, _, leaf = name.rpartition(".")
        if stage.get_parameter(name) is not stage.get_parameter(first):  # allocated separately
            setattr(stage.get_submodule(owner), leaf, stage.get_parameter(first))
    initialise(stage, seed, device)
    stage.train()


@dataclass
class _Adjacent:
    """Slice of the memory that several adjacent weights share.

    Attributes:
        memory: list with the shared tensor, allocated with the first weight; the same list object for all weights.
        rows: number of rows of all weights.
        first: first row of this weight.
        weight: the weight, on the meta device.
    """

    memory: list[Tensor]
    rows: int
    first: int
    weight: Tensor

    def to(self, device: torch.device) -> Tensor:
        """Return this weight's slice of the shared memory on a device; the first call allocates the memory."""
        if not self.memory:
            shape = (self.rows, *self.weight.shape[1:])
            self.memory.append(torch.empty(shape, dtype=self.weight.dtype, device=device))
        return self.memory[0][self.first : self.first + len(self.weight)]


def _adjacent(stage: nn.Module, apart: set[int]) -> dict[int, _Adjacent]:
    """Groups of weights to place adjacently in memory, as a mapping from the identity of a parameter to its slice.

    Args:
        stage: stage on the meta device.
        apart: identities of parameters that must have separate memory.
    """
    found: dict[int, _Adjacent] = {}
    for module in (module for module in stage.modules() if isinstance(module, HasAdjacentWeights)):
        for names in module.adjacent_weights():
            weights = [module.get_parameter(name) for name in names]
            alike = len({(weight.dtype, weight.shape[1:]) for weight in weights}) == 1
            plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
            if alike and plain and not any(id(weight) in apart for weight in weights):
                memory: list[Tensor] = []
                rows = sum(map(len, weights))
                first = 0
                for weight in weights:
                    found[id(weight)] = _Adjacent(memory, rows, first, weight)
                    first += len(weight)
    return found


def _tied(stage: nn.Module) -> dict[str, str]:
    """Tied parameters: each further name of a parameter -> its first name."""
    first: dict[int, str] = {}
    names = stage.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(parameter), name) for name, parameter in names}
    return {name: original for name, original in found.items() if name != original}
