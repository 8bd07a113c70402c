"""Identity of a corpus: equal identities mean equal documents, so that prepared data can be used again.

Corpora up to :data:`SMALL_CORPUS` bytes, and all corpora with ``digest: full``, are hashed as a whole. In other
corpora, the identity of a file larger than a sample is its size, its modification time and a sample of its bytes: a
start then reads little, but a copy of the files with other modification times is prepared again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from d9d_data.config import ModelTextConfig, PreparedConfig, TokenizedConfig
from d9d_data.corpus.cache import SAMPLE_BLOCK, SAMPLE_BLOCKS, sample_begins
from d9d_data.corpus.encoding import encoding_of, tokenizer_of
from d9d_data.sources.document import Piece, topics_digest
from d9d_data.sources.opening import FileStat, SourceFile, open_stored, read_blocks, stat_file
from d9d_data.tokenizer.file import find_tokenizer_file
from d9d_data.tokenizer.select import tokenizer_identity

#: Version number in the identity; increase it when the layout of prepared data or the tokenisation changes.
FORMAT = 8
#: Bytes of the largest corpus that is hashed as a whole even with ``digest: sampled``.
SMALL_CORPUS = 1 << 26
_READ = 1 << 20  # bytes


def corpus_key(config: PreparedConfig, pieces: Sequence[Piece]) -> str:
    """Identity of a prepared corpus: its key in the cache, which does not depend on the paths of the files.

    Args:
        config: config of the dataset, which decides how documents become tokens.
        pieces: the files, in order.

    Raises:
        DataError: a file cannot be read.
    """
    settings = {
        "format": FORMAT,
        "held_out": config.held_out,
        "malformed": config.malformed,
        "special_tokens": config.special_tokens,
        **_encoding(config),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    stats = [_stat(piece.file) for piece in pieces]
    sampled = config.digest == "sampled" and sum(stat.size for stat in stats) > SMALL_CORPUS
    for piece, stat in zip(pieces, stats, strict=True):
        content = _content(piece.file, stat, sampled)
        # Format, compression and field are part of the key, because the same bytes can be read in several ways.
        digest.update(f"{piece.file.format} {piece.file.compression} {piece.field} {content}\n".encode())
    return f"text-{digest.hexdigest()[:32]}"


def _encoding(config: PreparedConfig) -> dict[str, Any]:
    choice, end = tokenizer_of(config)
    tokenizer = tokenizer_identity(choice)
    encoding = encoding_of(config)
    if isinstance(config, TokenizedConfig):
        records = {encoding.encoder: encoding.settings} if encoding.settings else {}
        return {"tokenizer": tokenizer, "end_of_text": end, **records}
    from d9d_data.chat.template import ChatTemplate  # imported here, because texts need no chat template

    assert isinstance(config, ModelTextConfig)
    assert isinstance(choice, str)
    template = ChatTemplate.find(find_tokenizer_file(choice, only_files=True), arguments=config.template_arguments)
    return {
        "tokenizer": tokenizer,
        encoding.encoder: encoding.settings,
        "template": None if template is None else template.identity,
    }


def _stat(file: SourceFile) -> FileStat:
    return FileStat(0, "") if file.format == "topics" else stat_file(file.address)


def _content(file: SourceFile, stat: FileStat, sampled: bool) -> str:
    if file.format == "topics":
        return topics_digest()
    if not sampled or stat.size <= SAMPLE_BLOCK * SAMPLE_BLOCKS:
        return _whole(file.address)
    return f"sample {stat.size} {stat.modified} {_sample(file.address, stat.size)}"


def _whole(address: str) -> str:
    digest = hashlib.sha256()
    with open_stored(address) as stored:
        while block := stored.read(_READ):
            digest.update(block)
    return digest.hexdigest()


def _sample(address: str, size: int) -> str:
    digest = hashlib.sha256()
    for block in read_blocks(address, sample_begins(size), SAMPLE_BLOCK):
        digest.update(block)
    return digest.hexdigest()
