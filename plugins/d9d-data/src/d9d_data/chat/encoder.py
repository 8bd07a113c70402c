"""Encoder of the conversations in structured files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from d9d_data.chat.conversation import ToolArguments, has_string_arguments
from d9d_data.chat.encode import ChatTokenizer, Loss, encode_weighted, is_trainable, strings_in, truncate
from d9d_data.chat.formats import read_conversation
from d9d_data.chat.template import ChatTemplate
from d9d_data.config import ChatFormat
from d9d_data.corpus.encoder import Dropped, Encoded, Sample, encode_samples
from d9d_data.corpus.fit import Limit, Policy
from d9d_data.sources.document import Piece
from d9d_data.sources.place import Record, Reject
from d9d_data.tokenizer.base import TextTokenizer


class ChatEncoder:
    """Encoder of chat records: renders conversations with a template and gives loss weight to the replies.

    The encoder counts a conversation as dropped if it is left out because it is too long, or if it has no token to
    train on after truncation.

    Args:
        tokenizer: text tokenizer of the model.
        template: chat template of the model.
        loss: tokens with a loss weight, as for :func:`encode_weighted`.
        longest: maximum number of tokens of a sample.
        too_long: treatment of longer conversations.
        tool_arguments: treatment of tool arguments that are JSON strings.
        format: format of the records; ``None`` if each record shows its own.
    """

    columns: Mapping[str, npt.DTypeLike] = {"weights": np.bool_, "scales": np.float32}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        loss: Loss,
        longest: int,
        too_long: Policy,
        tool_arguments: ToolArguments = "parse",
        format: ChatFormat | None = None,  # noqa: A002 - the name of the config's field
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = ChatTokenizer.of(tokenizer)
        self._texts = tokenizer
        self._tool_arguments = tool_arguments
        self._template = template
        self._loss = loss
        self._format = format
        self._limit = Limit(longest, too_long)

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:
        """Make an encoder in a worker process, from values that can be pickled.

        Args:
            tokenizer: text tokenizer of the model.
            file: the ``tokenizer.json``; the template is in the same directory.
            settings: ``arguments`` of the template, and the other arguments of the class.
        """
        rest = dict(settings)
        assert file is not None
        fields = rest.pop("format", None)
        template = ChatTemplate.load(file, arguments=rest.pop("arguments"))
        return cls(tokenizer, template, **rest, format=ChatFormat(**fields) if isinstance(fields, dict) else None)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode conversations; reject records that are malformed or that the template refuses."""
        return encode_samples(pieces, reject, self._sample)

    def _sample(self, record: Record) -> Sample | Dropped:
        where = str(record.place)
        conversation = read_conversation(record.values, where, self._tool_arguments, self._format)
        quoted = self._texts.quoted
        whole = encode_weighted(conversation, self._template, self._tokenizer, self._loss, quoted)
        kept = truncate(*whole, self._limit, where)
        if kept is None or not is_trainable(kept[1]):
            learnable = np.flatnonzero(whole[1][1:]) + 2
            return Dropped(len(whole[0]), int(learnable[0]) if len(learnable) else 0)
        ids, weights = kept
        learned = weights > 0
        return Sample(
            [ids],
            {"weights": [learned], "scales": [np.where(learned, weights, np.float32(1))]},
            lost=[len(whole[0]) - len(ids)],
            spelling=self._texts.spelled(strings_in([conversation.messages, conversation.tools])),
            parsed=has_string_arguments(record.values),
            stop=self._tokenizer.stop_of(ids[1:][weights[1:] > 0]),
            incomplete=bool(np.count_nonzero(whole[1][1:]) > np.count_nonzero(weights[1:])),
        )
