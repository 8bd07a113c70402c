"""Microbatches as tasks of language models read them. Shapes: B samples, S positions."""

from __future__ import annotations

import torch
from d9d_core.extend import JobError, Microbatch, PositionShare, StageInputs
from torch import Tensor


def check_fields(microbatch: Microbatch, task: str, *names: str) -> None:
    """Check that a microbatch has the tensors that a task reads.

    Args:
        microbatch: of the dataset.
        task: name of the task, for messages.
        names: of the tensors.

    Raises:
        JobError: it lacks one.
    """
    if missing := [name for name in names if name not in microbatch]:
        raise JobError(
            f"data: task '{task}' reads {', '.join(missing)}, and the dataset gives {', '.join(sorted(microbatch))}; "
            "use a dataset for this task, or another task"
        )


def count_positions(microbatch: Microbatch) -> int | Tensor:
    """Number of positions without padding: of ``lengths``, 0-d; or of the shape of ``tokens`` where there is none."""
    return microbatch["lengths"].sum() if "lengths" in microbatch else microbatch["tokens"].numel()


def stage_inputs(microbatch: Microbatch, *more: str) -> StageInputs:
    """Inputs of a stage: ``tokens`` [B, S] enter the first one; what else there is reaches every stage.

    Args:
        microbatch: with ``tokens``, and maybe ``positions``, ``documents`` and ``lengths``.
        more: further names that the model takes, if they are there.
    """
    names = ("positions", "documents", "lengths", *more)
    shared = {name: microbatch[name] for name in names if name in microbatch}
    return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)


def own_positions(microbatch: Microbatch, share: PositionShare, task: str) -> Microbatch:
    """A rank's part of a microbatch whose fields are of positions, as :meth:`SplitsPositions.split_positions` says.

    Fields [B, S, ...] are split, ``documents`` stays whole, and so do fields of samples. ``positions`` are there
    afterwards.

    Args:
        microbatch: with ``tokens`` [B, S].
        share: the rank's.
        task: name of the task, for messages.

    Raises:
        JobError: there is padding.
        ValueError: the ranks cannot share S positions evenly.
    """
    if "lengths" in microbatch:
        raise JobError(
            f"data: mesh.cp is {share.ranks}, but samples are padded ('lengths'), and task '{task}' splits samples of "
            "which every position counts; choose data whose samples are full, such as text in windows, or leave "
            "mesh.cp out"
        )
    shape = microbatch["tokens"].shape
    counted = {"positions": torch.arange(shape[1], device=microbatch["tokens"].device).expand(shape)}
    return {
        name: share.own(tensor) if name != "documents" and tensor.shape[:2] == shape else tensor
        for name, tensor in {**counted, **microbatch}.items()
    }
