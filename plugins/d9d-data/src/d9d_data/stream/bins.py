"""Bins of whole documents: each bin is a sequence filled by best-fit decreasing, or in the order of the documents.

Shapes: N tokens, D items (pieces of documents), S positions, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from d9d_data.stream.packing import NO_TARGET

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bins:
    """Assignment of items to bins.

    Attributes:
        members: int64 [D], indices of the items, grouped by bin.
        starts: int64 [bins + 1], index in ``members`` where each bin begins, then D.
        unused: fraction of the bins' positions that stay empty.
    """

    members: Int64
    starts: Int64
    unused: float

    def __len__(self) -> int:
        return len(self.starts) - 1


def best_fit(lengths: Int64, capacity: int) -> Bins:
    """Fill bins by best-fit decreasing: items from the longest to the shortest, each into the fullest bin with room.

    The number of bins is at most 11/9 of the minimum, plus four (Johnson 1973). The result depends on the lengths
    alone.

    Args:
        lengths: int64 [D], number of positions of each item, from 1 to ``capacity``.
        capacity: number of positions of a bin.
    """
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by their free positions
    rooms = np.zeros(capacity + 1, dtype=np.bool_)
    count = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        room = length + int(rooms[length:].argmax())
        if rooms[room]:
            chosen = with_room[room].pop()
            rooms[room] = bool(with_room[room])
        else:
            chosen, room, count = count, capacity, count + 1
        left = room - length
        with_room[left].append(chosen)
        rooms[left] = True
        bin_of[sample] = chosen
    members = np.argsort(bin_of, kind="stable").astype(np.int64)
    starts = np.searchsorted(bin_of[members], np.arange(count + 1)).astype(np.int64)
    return Bins(members, starts, 1 - float(lengths.sum()) / (count * capacity))


def next_fit(lengths: Int64, capacity: int) -> Bins:
    """Fill bins in order: an item that does not fit into the last bin opens the next bin.

    Args:
        lengths: int64 [D], number of positions of each item, from 1 to ``capacity``.
        capacity: number of positions of a bin.
    """
    ends = np.cumsum(lengths)
    starts = [0]
    while starts[-1] < len(lengths):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, before + capacity, side="right")))
    count = len(starts) - 1
    unused = 1 - float(lengths.sum()) / (count * capacity) if count else 0.0
    return Bins(np.arange(len(lengths), dtype=np.int64), np.asarray(starts, dtype=np.int64), unused)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of tokens with which bins are filled: whole documents, or parts of documents that are longer than a bin.

    Attributes:
        firsts: int64 [D], index of each piece's first token.
        lengths: int64 [D], number of positions of each piece. A piece of length 0, one token, also takes one position.
        targets: int64 [D], number of positions of each piece with a target, the next token; ``None`` if all positions
            have a target.
    """

    firsts: Int64
    lengths: Int64
    targets: Int64 | None = None


def cut_pieces(starts: Int64, sequence_length: int) -> Pieces:
    """Cut documents into pieces of ``sequence_length`` positions; only the last piece of a document may be shorter.

    Args:
        starts: int64 [documents + 1], index of each document's first token, then the number of tokens.
        sequence_length: maximum number of positions of a piece.
    """
    positions = np.diff(starts) - 1  # the last token of a document is a target only
    counts = -(-positions // sequence_length)
    documents = np.repeat(np.arange(len(positions)), counts)
    within = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = within * sequence_length
    return Pieces(starts[documents] + begins, np.minimum(positions[documents] - begins, sequence_length))


def pack_bins(
    tokens: npt.NDArray[np.integer[Any]],
    weights: npt.NDArray[np.bool_] | None,
    pieces: Pieces,
    bins: Bins,
    chosen: Int64,
    sequence_length: int,
    scales: npt.NDArray[np.float32] | None = None,
) -> Mapping[str, npt.NDArray[Any]]:
    """Make a microbatch of bins: one bin per sequence, followed by padding.

    Args:
        tokens: token ids [N] of all documents, concatenated.
        weights: [N], whether each token is learned; ``None`` if all tokens are learned.
        pieces: pieces of the documents.
        bins: bins of the pieces.
        chosen: indices [B] of the bins.
        sequence_length: S, the capacity of the bins.
        scales: [N], loss weight of each learned token; ``None`` if all weights are equal.

    Returns:
        ``tokens``, ``targets``, ``positions`` and ``documents`` [B, S] and ``lengths`` [B], as
        :func:`~d9d_data.stream.padding.pad` returns them; ``documents`` numbers the pieces of a bin from 0. With scales
        also ``weights`` float32 [B, S], the loss weight of each target, 0 without a target.
    """
    shape = (len(chosen), sequence_length)
    end = tokens[len(tokens) - 1]
    packed: dict[str, npt.NDArray[Any]] = {
        "tokens": np.full(shape, end, dtype=np.int64),
        "targets": np.full(shape, NO_TARGET, dtype=np.int64),
        "positions": np.zeros(shape, dtype=np.int64),
        "documents": np.zeros(shape, dtype=np.int64),
    }
    if scales is not None:
        packed["weights"] = np.zeros(shape, dtype=np.float32)
    used = np.zeros(len(chosen), dtype=np.int64)
    for row, which in enumerate(chosen.tolist()):
        place = number = 0
        for number, piece in enumerate(bins.members[bins.starts[which] : bins.starts[which + 1]].tolist()):
            first, length = int(pieces.firsts[piece]), int(pieces.lengths[piece])
            taken = max(length, 1)
            packed["tokens"][row, place : place + taken] = tokens[first : first + taken]
            packed["positions"][row, place : place + taken] = np.arange(taken)
            packed["documents"][row, place : place + taken] = number
            aimed = length if pieces.targets is None else int(pieces.targets[piece])
            here, targets = slice(place, place + aimed), slice(first + 1, first + 1 + aimed)
            learned = True if weights is None else weights[targets]
            packed["targets"][row, here] = np.where(learned, np.asarray(tokens[targets], dtype=np.int64), NO_TARGET)
            if scales is not None:
                packed["weights"][row, here] = np.where(learned, scales[targets], np.float32(0))
            place += taken
        packed["positions"][row, place:] = np.arange(sequence_length - place)
        packed["documents"][row, place:] = number + 1
        used[row] = place
    return {**packed, "lengths": used}
