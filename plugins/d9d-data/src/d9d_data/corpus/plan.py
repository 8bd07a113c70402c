"""Plan of the work on a corpus: shards of about equal size, which are tokenised separately.

Finished shards are kept if the process dies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from d9d_data.sources.document import Piece
from d9d_data.sources.opening import stat_file
from d9d_data.sources.tables import row_group_sizes

#: Default minimum size of a shard in bytes: about 10 seconds of work, which a killed process loses.
SHARD_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive pieces of a corpus that are tokenised together.

    Attributes:
        name: identifier of the shard, unique among all plans for one corpus; letters, digits and dashes only.
        pieces: pieces to read, in order.
        size: approximate number of bytes to read.
    """

    name: str
    pieces: tuple[Piece, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _Part:
    file: int
    piece: Piece
    size: int


def plan_shards(files: Sequence[Piece], shard_bytes: int | None = None) -> list[Shard]:
    """Plan the shards of a corpus without reading its documents.

    Consecutive small files share a shard. Of the files larger than ``shard_bytes``, uncompressed JSON lines are cut
    into ranges of bytes, and Parquet files between row groups; every other file stays whole.

    Args:
        files: the files, in order.
        shard_bytes: minimum size of a shard in bytes, except for the last shard; by default :data:`SHARD_BYTES`.

    Raises:
        DataError: a file cannot be read.
    """
    limit = shard_bytes or SHARD_BYTES
    shards: list[Shard] = []
    parts: list[_Part] = []
    for part in _parts(files, limit):
        parts.append(part)
        if _size_of(parts) >= limit:
            shards.append(_shard(len(shards), parts))
            parts = []
    if parts:
        shards.append(_shard(len(shards), parts))
    return shards


def _size_of(parts: Sequence[_Part]) -> int:
    return sum(part.size for part in parts)


def _parts(files: Sequence[Piece], limit: int) -> Iterator[_Part]:
    for number, piece in enumerate(files):
        file = piece.file
        if file.format == "topics":
            yield _Part(number, piece, 0)
            continue
        size = stat_file(file.address).size
        if size > limit and file.format == "jsonl" and not file.compression:
            for begin in range(0, size, limit):
                # The last range has no end: if the file grows meanwhile, its identity changes, which is reported.
                end = begin + limit if begin + limit < size else None
                yield _Part(number, replace(piece, begin=begin, end=end), min(limit, size - begin))
        elif size > limit and file.format == "parquet":
            yield from _row_groups(number, piece, limit)
        else:
            yield _Part(number, piece, size)


def _row_groups(number: int, piece: Piece, limit: int) -> Iterator[_Part]:
    begin, gathered = 0, 0
    sizes = row_group_sizes(piece.file)
    for group, size in enumerate(sizes, 1):
        gathered += size
        if gathered >= limit or group == len(sizes):
            yield _Part(number, replace(piece, begin=begin, end=group), gathered)
            begin, gathered = group, 0


def _shard(index: int, parts: Sequence[_Part]) -> Shard:
    # The paths are not part of the name: the corpus's identity already stands for the contents of the files.
    ranges = [(part.file, part.piece.begin, part.piece.end) for part in parts]
    digest = hashlib.sha256(json.dumps(ranges).encode()).hexdigest()[:16]
    return Shard(f"{index:06}-{digest}", tuple(part.piece for part in parts), _size_of(parts))
