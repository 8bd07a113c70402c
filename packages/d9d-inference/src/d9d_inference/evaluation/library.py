"""Evaluation from Python: the same as ``d9d evaluate``, in this process. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d9d_core.failures import exits_are_errors
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_engine.job import Job
from d9d_engine.joining import print_note, silent

from d9d_inference.evaluation.result import Report
from d9d_inference.evaluation.subject import Request, find_subject, same_data

if TYPE_CHECKING:
    from d9d_engine.distributed.mesh import Topology


def evaluate(
    target: str | Path | Job,
    data: Sequence[str | Path] = (),
    *,
    like: str | Path | Job | None = None,
    checkpoint: str | int | None = None,
    limit: int | None = None,
    compare: str | Path | Job | None = None,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = print_note,
    topology: Topology | None = None,
) -> Report:
    """Evaluate a trained model on whole datasets. Collective over all ranks.

    The values of dataset ``name`` are in ``report.first.sets[name]``.

    Args:
        target: job, job file, directory of a run or of one of its checkpoints, or a pretrained model.
        data: files of documents or conversations; by default the job's evaluation datasets, or its training data.
        like: job with the task, data and layout for a pretrained model.
        checkpoint: ``newest`` (default), ``best`` or a step.
        limit: number of rows to use from each dataset.
        compare: model to compare with, on the same samples.
        overrides: ``section.field=value``, for job files.
        note: called with one line of text for each warning and at the start of long operations.
        topology: rank and process groups, from :meth:`Job.joined`; by default, a single process.

    Raises:
        D9dError: the model cannot be evaluated.
    """
    world_size = 1 if topology is None else topology.world_size
    policy = PluginPolicy.from_environment(os.environ)
    chosen = None if checkpoint is None else str(checkpoint)
    request = Request(tuple(map(Path, data)), _job_or_path(like), chosen, overrides, policy, world_size)
    registry = target.registry if isinstance(target, Job) else discover(policy)
    first = find_subject(_job_or_text(target), request, registry)
    first.job.check(world_size)
    other = None
    if compare is not None:
        of_other = Request(like=first.job, policy=policy, world_size=world_size)
        other = same_data(find_subject(_job_or_text(compare), of_other, registry), first)
    from d9d_engine.distributed.devices import choose_device
    from d9d_engine.distributed.mesh import Topology

    from d9d_inference.evaluation.compose import evaluate as measure

    if topology is None:
        job = first.job
        topology = Topology(sizes=job.mesh.sizes(), device=choose_device(job.device), views=job.views())
    with exits_are_errors():
        return measure(first, topology, note if topology.is_main else silent, limit, other)


def _job_or_path(given: str | Path | Job | None) -> Path | Job | None:
    return Path(given) if isinstance(given, str) else given


def _job_or_text(given: str | Path | Job) -> str | Job:
    return str(given) if isinstance(given, Path) else given
