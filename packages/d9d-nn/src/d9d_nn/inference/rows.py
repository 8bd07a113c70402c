"""Rows of samples, padded or packed. Shapes: b samples, S positions, at most N rows per sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from d9d_core.types import Microbatch, State
from torch import Tensor

#: Names of the tensors of a microbatch that locate its rows.
PLACES = ("documents", "lengths")


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Location of a row of the data in a microbatch.

    Attributes:
        row: number of the row in the data.
        sample: index of the sample that holds the row.
        index: index of the row among the rows of this sample.
        positions: positions of the row in the sample.
    """

    row: int
    sample: int
    index: int
    positions: slice


def is_packed(facts: State) -> bool:
    """Whether each sample of the data holds several rows."""
    return facts.get("packed") is True


def places_of(microbatch: Microbatch) -> dict[str, Tensor]:
    """Tensors of a microbatch by which :func:`row_places` locates rows, as far as the microbatch has them."""
    return {name: microbatch[name] for name in PLACES if name in microbatch}


def row_places(kept: Mapping[str, Tensor], positions: int, packed: bool) -> Iterator[RowPlace]:
    """Yield the location of each row of a microbatch, in the order of its samples.

    Args:
        kept: ``rows`` int64 [b], and optionally ``lengths`` int64 [b] and ``documents`` int64 [b, S].
        positions: S.
        packed: whether samples hold several rows each.
    """
    firsts = kept["rows"].tolist()
    lengths = kept["lengths"].tolist() if "lengths" in kept else [positions] * len(firsts)
    documents: Any = kept["documents"].numpy() if packed else None
    for sample, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        if documents is None:
            yield RowPlace(first, sample, 0, slice(0, length))
            continue
        bounds = [0, *(np.flatnonzero(np.diff(documents[sample, :length])) + 1).tolist(), length]
        for index in range(len(bounds) - 1):
            yield RowPlace(first + index, sample, index, slice(bounds[index], bounds[index + 1]))
