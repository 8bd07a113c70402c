"""Microbatches of samples from several datasets, padded to one length.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from d9d_data.stream.packing import NO_TARGET

Sample = Mapping[str, npt.NDArray[Any]]
LENGTHS = "lengths"


def merge(samples: Sequence[Sample], fill: Mapping[str, float] | None = None) -> Sample:
    """Merge samples into a microbatch; pad each array to the length of the longest sample.

    The padding is a separate document at the end of a sample, with its own positions and without targets or labels. A
    sample that already ends in padding gets a longer padding.

    Args:
        samples: arrays [1, ...] by name, with the same names in all samples; more rows if a sample has several texts.
        fill: padding value of each array; by default 0, and -100 in ``targets`` and ``labels``.

    Returns:
        Arrays [B, S, ...], or [B] for one-dimensional arrays.
    """
    return {name: np.concatenate(_padded(name, samples, fill or {})) for name in samples[0]}


def with_lengths(sample: Sample) -> Sample:
    """Sample with ``lengths``, the number of positions before padding; all positions by default."""
    if LENGTHS in sample:
        return sample
    rows, positions = sample["tokens"].shape
    return {**sample, LENGTHS: np.full(rows, positions, dtype=np.int64)}


def _padded(name: str, samples: Sequence[Sample], fill: Mapping[str, float]) -> list[npt.NDArray[Any]]:
    arrays = [sample[name] for sample in samples]
    if arrays[0].ndim == 1:
        return arrays
    longest = max(array.shape[1] for array in arrays)
    return [
        array if array.shape[1] == longest else np.concatenate([array, _fill(name, sample, longest, fill)], axis=1)
        for array, sample in zip(arrays, samples, strict=True)
    ]


def _fill(name: str, sample: Sample, longest: int, fill: Mapping[str, float]) -> npt.NDArray[Any]:
    """Padding that extends an array to ``longest`` positions."""
    array = sample[name]
    rows, length = array.shape[:2]
    ends = sample[LENGTHS] if LENGTHS in sample else np.full(rows, length)  # [rows]
    if name == "positions":
        return np.arange(length, longest, dtype=array.dtype)[None, :] - ends[:, None]
    if name == "documents":
        last = array[:, -1:] + (ends == length)[:, None]
        return np.repeat(last, longest - length, axis=1)
    value = fill.get(name, NO_TARGET if name in ("targets", "labels") else 0)
    return np.full((rows, longest - length, *array.shape[2:]), value, dtype=array.dtype)
