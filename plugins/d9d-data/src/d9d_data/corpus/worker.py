"""Worker process that tokenises shards: ``python -m d9d_data.corpus.worker``, started by :mod:`d9d_data.corpus.pool`.

The worker reads lines of JSON: first a :class:`Setup`, then shards. It answers each shard with lines of JSON:
``{"read": bytes}`` to report progress, and at the end ``{"done": true}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from d9d_core.errors import DataError

from d9d_data.config import BpeTokenizer, PreparedConfig
from d9d_data.corpus.encoder import Encoder
from d9d_data.corpus.encoding import ENCODERS, encoding_of, tokenizer_of
from d9d_data.corpus.plan import Shard
from d9d_data.corpus.shards import write_shard
from d9d_data.sources.document import Piece
from d9d_data.sources.opening import SourceFile
from d9d_data.tokenizer.base import TextTokenizer
from d9d_data.tokenizer.file import find_tokenizer_file
from d9d_data.tokenizer.select import saved_tokenizer

#: Directory of a trained tokenizer, next to the directories of the shards.
TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a worker process, the same for all of its shards.

    Attributes:
        tokenizer: ``bytes``, a path, or the vocabulary size of a trained tokenizer.
        end_of_text: token that ends documents, if the config names one.
        tokenizer_directory: directory of a trained tokenizer.
        special_tokens: treatment of special tokens spelled in texts.
        malformed: treatment of malformed records.
        work: parent of the shards' directories.
        encoder: name of the encoder, see :data:`~d9d_data.corpus.encoding.ENCODERS`.
        settings: settings of the encoder.
    """

    tokenizer: str | int
    end_of_text: str | None
    tokenizer_directory: str
    special_tokens: Literal["text", "token"]
    malformed: Literal["error", "skip"]
    work: str
    encoder: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, config: PreparedConfig, work: Path) -> Setup:
        """Make the settings for the corpus of a config."""
        choice, end = tokenizer_of(config)
        encoding = encoding_of(config)
        return cls(
            choice.bpe if isinstance(choice, BpeTokenizer) else choice,
            end,
            str(work / TOKENIZER),
            config.special_tokens,
            config.malformed,
            str(work),
            encoding.encoder,
            encoding.settings,
        )

    def make_encoder(self) -> tuple[Encoder, TextTokenizer]:
        """Make the encoder of the records, and its tokenizer.

        Raises:
            DataError: the file of the tokenizer or of the template is missing or invalid.
        """
        choice = BpeTokenizer(bpe=self.tokenizer) if isinstance(self.tokenizer, int) else self.tokenizer
        tokenizer = saved_tokenizer(choice, self.end_of_text, Path(self.tokenizer_directory))
        if self.special_tokens == "token":
            tokenizer.recognise_special_tokens()
        file = None if isinstance(choice, BpeTokenizer) or choice == "bytes" else find_tokenizer_file(choice)
        encoder: Encoder = ENCODERS[self.encoder].load().load(tokenizer, file, self.settings)
        return encoder, tokenizer

    def encode(self) -> str:
        """Encode the settings as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def encode_shard(shard: Shard) -> str:
    """Encode a shard as a line of JSON."""
    return json.dumps(asdict(shard)) + "\n"


def decode_shard(line: str) -> Shard:
    """Decode a shard from a line of JSON."""
    value = json.loads(line)
    pieces = tuple(Piece(**piece | {"file": SourceFile(**piece["file"])}) for piece in value["pieces"])
    return Shard(**value | {"pieces": pieces})


def serve(lines: TextIO, answers: TextIO) -> None:
    """Serve as a worker process: tokenise shards until ``lines`` ends, which ends the process.

    Args:
        lines: requests, as lines of JSON: the setup, then shards.
        answers: file to which progress and results are written.
    """

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    setup = Setup(**json.loads(lines.readline()))
    shards: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(lines, shards), daemon=True).start()
    encoder = None
    while True:
        shard = shards.get()
        try:
            if encoder is None:
                encoder, _ = setup.make_encoder()
            write_shard(encoder, shard, setup.malformed, Path(setup.work), lambda count: answer(read=count))
        except DataError as error:
            answer(error=str(error))
        else:
            answer(done=True)


def _receive(lines: TextIO, shards: queue.SimpleQueue[Shard]) -> None:
    for line in lines:
        shards.put(decode_shard(line))
    os._exit(0)  # the parent is gone or has finished; an unfinished shard is never published


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    serve(sys.stdin, sys.stdout)
