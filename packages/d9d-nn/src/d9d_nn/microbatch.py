"""Microbatches of language model tasks. Shapes: B samples, S positions."""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.errors import JobError
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch
from torch import Tensor

from d9d_nn.ops.linear_cross_entropy import IGNORE

#: Names of fields that every rank of ``cp`` gets whole, even if they have S columns.
_WHOLE = ("documents", "ends", "pooling_mask", "attention_blocks")
#: Name of the field with the number of this rank's positions of each sample, without padding, int64 [B].
_OWN_LENGTHS = "own_lengths"
#: Name of the field with the indices of the samples that this rank counts: all, int64 [B], or none, int64 [0]. The
#: shape is known without waiting for the device.
_COUNTED = "counted_samples"


def check_fields(microbatch: Microbatch, task: str, *names: str) -> None:
    """Check that a microbatch has the tensors that a task reads.

    Args:
        microbatch: microbatch of the dataset.
        task: name of the task, for messages.
        names: names of the tensors.

    Raises:
        JobError: the microbatch lacks one of the tensors.
    """
    if missing := [name for name in names if name not in microbatch]:
        raise JobError(
            f"data: task '{task}' reads {', '.join(missing)}, but the dataset gives {', '.join(sorted(microbatch))}; "
            "use a dataset for this task, or another task"
        )


def count_positions(microbatch: Microbatch) -> int | Tensor:
    """Number of positions without padding: from ``lengths`` (0-d), else from the shape of ``tokens``.

    If the ranks of ``cp`` split the positions, the number counts only this rank's positions.
    """
    lengths = microbatch.get(_OWN_LENGTHS, microbatch.get("lengths"))
    return microbatch["tokens"].numel() if lengths is None else lengths.sum()


def stage_inputs(microbatch: Microbatch, *more: str) -> StageInputs:
    """Inputs of a pipeline stage: ``tokens`` [B, S] go to the first stage; all other inputs go to every stage.

    Args:
        microbatch: with ``tokens``, and optionally ``positions``, ``documents``, ``lengths`` and ``attention_blocks``.
        more: further inputs of the model, if the microbatch has them.
    """
    names = ("positions", "documents", "lengths", "attention_blocks", *more)
    shared = {name: microbatch[name] for name in names if name in microbatch}
    return StageInputs(first={"tokens": microbatch["tokens"]}, shared=shared)


def with_prefixes(microbatch: Microbatch) -> Microbatch:
    """Add ``attention_blocks`` to a microbatch: the prefix of each document is block 0, other positions are outside.

    The prefix of a document ends with the token before its first target, so no token of it is predicted, and the
    attention inside it shows no target. A microbatch with ``attention_blocks`` is returned unchanged.

    Args:
        microbatch: with ``targets`` int64 [B, S], and ``documents`` int64 [B, S] if samples hold several.

    Raises:
        JobError: the microbatch has neither blocks nor targets.
    """
    if "attention_blocks" in microbatch:
        return microbatch
    if "targets" not in microbatch:
        raise JobError(
            "model.attention_mask: prefixes are the tokens before a document's first target, but the dataset gives "
            "neither targets nor attention_blocks; use a dataset that does, or another attention_mask"
        )
    counted = (microbatch["targets"] != IGNORE).to(torch.int64)
    before = counted.cumsum(1) - counted  # targets at earlier positions of the sample
    if "documents" in microbatch:
        starts = microbatch["documents"].diff(dim=1, prepend=microbatch["documents"][:, :1]) != 0
        before = before - torch.where(starts, before, 0).cummax(1).values
    return {**microbatch, "attention_blocks": torch.where(before == 0, 0, -1)}


def masks_of(*models: Any) -> tuple[str, ...]:
    """Values of ``attention_mask`` in the given configs of models, as far as they have this field."""
    found = (getattr(model, "attention_mask", None) for model in models)
    return tuple(mask for mask in found if isinstance(mask, str))


def check_prefixes(model: Any, task: str) -> None:
    """Refuse a model with prefix attention, for a task whose microbatches have no targets to end a prefix.

    Args:
        model: config of the model.
        task: name of the task.

    Raises:
        JobError: ``attention_mask`` of the model is ``prefix``.
    """
    if "prefix" in masks_of(model):
        raise JobError(
            "model.attention_mask: a prefix is the tokens before a document's first target, but task "
            f"'{task}' reads no targets; set it to bidirectional or causal, or to blocks if the dataset gives "
            "attention_blocks"
        )


def with_blocks(microbatch: Microbatch, *masks: str) -> Microbatch:
    """Add ``attention_blocks`` for models with prefixes, and check that the dataset gives the blocks that models read.

    Args:
        microbatch: microbatch of the dataset.
        masks: ``attention_mask`` of each model that reads it; none if they are not known.

    Raises:
        JobError: a model needs blocks or prefixes that the dataset does not give, or no model reads the blocks that the
            dataset gives.
    """
    given = "attention_blocks" in microbatch
    if "blocks" in masks and not given:
        raise JobError(
            "model.attention_mask: blocks are the field attention_blocks of the dataset, int64 [B, S], which this "
            "dataset does not give; use a dataset that does, or another attention_mask"
        )
    if given and masks and not {"blocks", "prefix"}.intersection(masks):
        raise JobError(
            f"model.attention_mask: the dataset gives attention_blocks, which {masks[0]} does not read; set it to "
            "blocks or prefix, or leave the field out of the data"
        )
    return with_prefixes(microbatch) if "prefix" in masks else microbatch


def counted_targets(microbatch: Microbatch) -> Tensor:
    """Number of targets that count, or the sum of their ``weights``: float32, 0-d."""
    counted = microbatch["targets"] != IGNORE
    return (microbatch["weights"] * counted if "weights" in microbatch else counted).sum(dtype=torch.float32)


def own_positions(microbatch: Microbatch, share: PositionShare) -> Microbatch:
    """Split a microbatch by positions and return this rank's part, see :class:`d9d_core.task.SplitsPositions`.

    Fields [B, S, ...] are split; ``documents``, ``attention_blocks``, ``ends``, ``pooling_mask`` and fields of samples
    stay whole. The result always has ``positions``.

    Args:
        microbatch: with ``tokens`` [B, S].
        share: positions of this rank.

    Raises:
        ValueError: the ranks cannot share S positions evenly.
    """
    shape = microbatch["tokens"].shape
    places = torch.arange(shape[1], device=microbatch["tokens"].device).unsqueeze(0)
    whole = {"positions": places.expand(shape), **microbatch}
    own = {
        name: share.own(tensor) if name not in _WHOLE and tensor.shape[:2] == shape else tensor
        for name, tensor in whole.items()
    }
    if "lengths" in microbatch:
        own[_OWN_LENGTHS] = (share.own(places) < microbatch["lengths"].unsqueeze(1)).sum(dim=1)
    return own


def own_positions_of_samples(microbatch: Microbatch, share: PositionShare) -> Microbatch:
    """This rank's part of a microbatch for a task with losses of whole samples; see :func:`counts_samples`.

    All ranks of ``cp`` compute the same loss for a sample, so only the rank with the sample's first position counts it.

    Args:
        microbatch: with ``tokens`` [B, S].
        share: positions of this rank.

    Raises:
        ValueError: the ranks cannot share S positions evenly.
    """
    samples, positions = microbatch["tokens"].shape
    first = bool((share.own(torch.arange(positions).unsqueeze(0)) == 0).any())
    counted = torch.arange(samples if first else 0, device=microbatch["tokens"].device)
    return {**own_positions(microbatch, share), _COUNTED: counted}


def counts_samples(microbatch: Microbatch) -> bool:
    """Whether this rank counts values of whole samples; otherwise another rank of ``cp`` does."""
    return _COUNTED not in microbatch or len(microbatch[_COUNTED]) > 0
