"""Text output of ``d9d explain`` and ``d9d check`` about pipeline stages."""

from __future__ import annotations

import torch
from d9d_core.traits import HasBlocks, PipelineStage, modules_with
from d9d_core.types import TensorSpec
from rich.console import Console
from rich.table import Table
from torch import nn

from d9d_engine.compose.communication.step import Unread
from d9d_engine.compose.plan import Plan
from d9d_engine.job import Job


def pipeline_line(job: Job, plan: Plan) -> str:
    """Summary line of the pipeline: schedule, stages, ranks and microbatches."""
    pipeline = plan.assembly.pipeline
    stages, name = len(pipeline.hosts), "no schedule" if job.pipeline is None else job.pipeline.name
    return f"{name}, {stages} stage(s) on {pipeline.ranks} rank(s), {job.microbatches} microbatch(es)"


def print_stages(console: Console, job: Job, plan: Plan) -> None:
    """Print a table of stages: layers, pipeline rank, parameters and the tensors passed to the next stage."""
    assembly = plan.assembly
    table = Table("  stage", "rank along pp", "layers", "parameters", "sent tensors", box=None)
    for index, (stage, host) in enumerate(zip(assembly.all_stages, assembly.pipeline.hosts, strict=True)):
        count = sum(parameter.numel() for parameter in stage.parameters())
        table.add_row(f"  {index}", str(host), layers_of(stage), f"{count:,}", handed_on(stage, job))
    console.print(table)
    for name, stages in assembly.shared.items():
        console.print(f"  {name} is in stages {' and '.join(map(str, stages))}, kept equal")


def layers_of(stage: nn.Module) -> str:
    """Names of the first and the last block of a stage, and the number of blocks."""
    # A model may return the blocks of its backbone, so the same block may be listed by two modules.
    names = {
        id(block): f"{owner}.{name}" if owner else name
        for owner, module in reversed(modules_with(stage, HasBlocks).items())
        for name, block in module.blocks().items()
    }
    ordered = list(names.values())
    if len(ordered) < 2:
        return "".join(ordered)
    return f"{ordered[0]} to {ordered[-1]} ({len(ordered)})"


def handed_on(stage: nn.Module, job: Job) -> str:
    """Names of the tensors passed to the next stage, with shapes if the data section sets the sample length."""
    length = getattr(job.data, "sequence_length", None)
    microbatch = Unread(TensorSpec((job.microbatch_size, length or 1), torch.int64))
    if not isinstance(stage, PipelineStage):
        return ""
    try:
        specs = stage.boundary(microbatch)
    except Exception:  # the keys of a microbatch depend on the data, which is not read here
        return "known when the data is read"
    return ", ".join(f"{name} {list(spec.shape)}" if length else name for name, spec in specs.items())
