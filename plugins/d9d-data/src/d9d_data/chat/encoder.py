"""Encoder of the conversations in structured files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from d9d_core.extend import DataError

from d9d_data.chat.conversation import read_conversation
from d9d_data.chat.encode import ChatTokenizer, Loss, Policy, encode, is_trainable, truncate
from d9d_data.chat.template import ChatTemplate
from d9d_data.corpus.encoder import Encoded
from d9d_data.sources.document import Piece
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.base import Ids, TextTokenizer

#: Policies of a job file for conversations that are too long, as :func:`~d9d_data.chat.encode.truncate` calls them.
POLICIES: dict[str, Policy] = {"cut_end": "end", "cut_start": "start", "drop": "drop", "error": "error"}
# Samples that are written together.
_BATCH_SAMPLES = 256


class ChatEncoder:
    """Encoder of conversations: rendered by a template, with weight on what the assistant writes.

    Conversations that are left out because they are too long, or that lost all that could be learned to a cut, count as
    dropped.

    Args:
        tokenizer: of the model.
        template: of the model.
        loss: which tokens are learned.
        longest: most tokens of a sample.
        too_long: what becomes of longer conversations: ``cut_end``, ``cut_start``, ``drop`` or ``error``.
    """

    weighted = True

    def __init__(
        self, tokenizer: TextTokenizer, template: ChatTemplate, loss: Loss, longest: int, too_long: str
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = ChatTokenizer.of(tokenizer)
        self._template = template
        self._loss = loss
        self._longest = longest
        self._policy = POLICIES[too_long]

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: str, settings: dict[str, Any]) -> ChatEncoder:
        """Make an encoder from what can be sent to another process.

        Args:
            tokenizer: of the model.
            file: the ``tokenizer.json``, beside which the template lies.
            settings: ``arguments`` of the template, and ``loss``, ``longest`` and ``too_long`` as above.
        """
        rest = dict(settings)
        template = ChatTemplate.load(Path(file), arguments=rest.pop("arguments"))
        return cls(tokenizer, template, **rest)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode conversations; one that is malformed, or that the template refuses, is rejected."""
        ids: list[Ids] = []
        weights: list[Any] = []
        characters = dropped = 0
        for piece in pieces:
            for record in read_records(piece.file, piece.begin, piece.end, reject=reject):
                try:
                    sample = self._sample(record)
                except DataError as error:
                    reject(record.place, str(error).removeprefix(str(record.place)).lstrip(": "))
                    continue
                if sample is None or not is_trainable(sample[1]):
                    dropped += 1
                    continue
                ids.append(sample[0])
                weights.append(sample[1])
                characters += 4 * len(sample[0])
                if len(ids) == _BATCH_SAMPLES:
                    yield Encoded(ids, weights, characters, dropped)
                    ids, weights, characters, dropped = [], [], 0, 0
        if ids or dropped:
            yield Encoded(ids, weights, characters, dropped)

    def _sample(self, record: Record) -> Any:
        where = str(record.place)
        conversation = read_conversation(record.values, where)
        ids, weights = encode(conversation, self._template, self._tokenizer, self._loss)
        return truncate(ids, weights, self._longest, self._policy, where)
