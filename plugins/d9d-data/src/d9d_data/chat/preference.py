"""Preference pairs: records with a preferred and a rejected completion, and their encoder.

A pair becomes two texts: the prompt with each completion. The completions begin at the first token where the token ids
of the rendered prompt and of the two texts differ, as in TRL's trainer for DPO.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.chat.conversation import (
    KEYS,
    ToolArguments,
    has_string_arguments,
    join_conversation,
    list_in,
    messages_of,
)
from d9d_data.chat.encode import ChatTokenizer, Weights, encode, encode_prompt, is_trainable, strings_in, truncate
from d9d_data.chat.formats import PREFERENCE_FORMATS, alone, check_fields, system_message, user_messages
from d9d_data.chat.template import ChatTemplate
from d9d_data.config import PreferenceFormat
from d9d_data.corpus.encoder import Dropped, Encoded, Sample, encode_samples
from d9d_data.corpus.fit import Limit, Policy
from d9d_data.sources.document import Piece
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import value_in
from d9d_data.tokenizer.base import Ids, TextTokenizer

SIDES = ("chosen", "rejected")
_SHAPE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'


@dataclass(frozen=True, slots=True)
class Pair:
    """Preference pair: a prompt with two completions.

    Attributes:
        prompt: string, or list of messages.
        chosen: preferred completion: string, or list of messages.
        rejected: other completion: string, or list of messages.
        tools: list of JSON schemas, as a string or parsed; ``None`` if there are none.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    tools: Any = None

    @property
    def plain(self) -> bool:
        """Whether prompt and completions are strings, which need no chat template."""
        return all(isinstance(part, str) for part in (self.prompt, self.chosen, self.rejected))


def read_pair(
    record: Mapping[str, Any],
    where: str,
    fields: PreferenceFormat = PREFERENCE_FORMATS["prompt"][0],
    arguments: ToolArguments = "keep",
) -> Pair:
    """Preference pair of a record.

    If the format has no field for the prompt, or if the prompt is a string and both sides are lists whose first message
    is not the assistant's, the sides are whole conversations or texts, and their common prefix is the prompt.

    Args:
        record: values by field.
        where: name of the record in error messages, such as ``pairs.jsonl:17``.
        fields: format of the record.
        arguments: treatment of tool arguments that are JSON strings.

    Raises:
        DataError: a field is missing, both sides are equal, a message is malformed, or whole conversations or texts
            have no common prefix.
    """
    check_fields(record, fields, PREFERENCE_FORMATS, where)
    chosen, rejected = value_in(record, fields.chosen), value_in(record, fields.rejected)
    if chosen == rejected:
        raise DataError(
            f"{where}: {fields.chosen} and {fields.rejected} are equal, so neither is preferred; leave the record out"
        )
    prompt = _prompt(record, fields, where, arguments)
    chosen = _messages(chosen, fields, f"{where}: {fields.chosen}", arguments)
    rejected = _messages(rejected, fields, f"{where}: {fields.rejected}", arguments)
    if prompt is None or (fields.user is None and isinstance(prompt, str) and _whole(chosen, rejected)):
        prompt, chosen, rejected = _split(chosen, rejected, where)
    system = system_message(record, fields, where)
    if system and isinstance(prompt, str):
        raise DataError(
            f"{where}: {fields.system} is a system message, but the prompt is a text that no chat template renders; "
            "write the prompt as messages, or name its field with 'user' instead of 'prompt'"
        )
    if system:
        place = fields.user or fields.prompt or fields.chosen
        prompt = [*system, *alone(tuple(prompt), system, where, fields, place)]
    return Pair(prompt, chosen, rejected, value_in(record, fields.tools))


def _prompt(record: Mapping[str, Any], fields: PreferenceFormat, where: str, arguments: ToolArguments) -> Any:
    """Prompt of a record: a string or a list of messages; ``None`` if the format has no field for it."""
    if fields.user is not None:
        return list(user_messages(record, fields, where, arguments))
    if fields.prompt is None:
        return None
    return _messages(value_in(record, fields.prompt), fields, f"{where}: {fields.prompt}", arguments)


def _messages(value: Any, fields: PreferenceFormat, where: str, arguments: ToolArguments) -> Any:
    """List of messages with the usual keys, of a list or of one message; any other value unchanged."""
    if isinstance(value, Mapping):
        value = [value]
    if (fields.role, fields.content, fields.roles) == (KEYS.role, KEYS.content, KEYS.roles):
        return value
    value = list_in(value, where)
    return list(messages_of(value, where, arguments, fields)) if isinstance(value, list) else value


def _whole(*sides: Any) -> bool:
    """Whether all values are whole conversations: lists whose first message is not the assistant's."""
    return all(
        isinstance(side, list) and side and isinstance(side[0], Mapping) and side[0].get("role") != "assistant"
        for side in sides
    )


def _split(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Prompt of two whole conversations or texts: their common prefix, and the remaining completion of each."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        size = len(commonprefix([chosen, rejected]))  # noqa: RUF071 - of characters
        size -= chosen[size - 1 : size] == " "  # the space goes to the completions: most tokens begin with one
    elif isinstance(chosen, list) and isinstance(rejected, list):
        # Both sides keep at least one message, even if one is a prefix of the other.
        most = min(len(chosen), len(rejected)) - 1
        size = next((place for place in range(most) if chosen[place] != rejected[place]), max(0, most))
    else:
        raise DataError(
            f"{where}: without a prompt, chosen and rejected must be two strings or two lists of messages; write "
            f"{_SHAPE}"
        )
    if not size:
        raise DataError(
            f"{where}: chosen and rejected are whole conversations or texts, but have no common beginning to use as "
            f"the prompt; write records such as {_SHAPE}"
        )
    return chosen[:size], chosen[size:], rejected[size:]


class PreferenceEncoder:
    """Encoder of preference pairs: two texts per pair, chosen and rejected, with loss weight on the completions.

    Args:
        tokenizer: text tokenizer of the model.
        template: chat template of the model; ``None`` if the model has no template, and only strings can be encoded.
        longest: maximum number of tokens of a text.
        too_long: treatment of longer texts (``cut_end``, ``cut_start``) or of pairs with a longer text (``drop``,
            ``error``).
        tool_arguments: treatment of tool arguments that are JSON strings.
        format: format of the records.
    """

    columns: Mapping[str, npt.DTypeLike] = {"weights": np.bool_}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        longest: int,
        too_long: Policy,
        tool_arguments: ToolArguments = "parse",
        format: PreferenceFormat = PREFERENCE_FORMATS["prompt"][0],  # noqa: A002 - the name of the config's field
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._texts = tokenizer
        self._tokenizer = ChatTokenizer.of(tokenizer)
        self._template = template
        self._format = format
        self._tool_arguments = tool_arguments
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
        arguments, fields = rest.pop("arguments"), rest.pop("format", None)
        template = None if file is None else ChatTemplate.find(file, arguments=arguments)
        chosen = PreferenceFormat(**fields) if isinstance(fields, dict) else PREFERENCE_FORMATS["prompt"][0]
        return cls(tokenizer, template, **rest, format=chosen)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode pairs; reject records that are malformed or that the template refuses."""
        return encode_samples(pieces, reject, self._sample)

    def _sample(self, record: Record) -> Sample | Dropped:
        where = str(record.place)
        prompt, whole = self._ids(read_pair(record.values, where, self._format, self._tool_arguments), where)
        begin = min(_common(prompt, ids) for ids in whole)
        cut: list[tuple[Ids, Weights]] = []
        for name, ids in zip(SIDES, whole, strict=True):
            if len(ids) == begin:
                raise DataError(
                    f"{where}: {name} adds no token to the prompt; give a completion, or leave the pair out"
                )
            kept = truncate(ids, np.arange(len(ids)) >= begin, self._limit, f"{where}: {name}")
            if kept is None:
                return Dropped(max(map(len, whole)), begin + 1)
            if not is_trainable(kept[1]):
                raise DataError(
                    f"{where}: no token of {name} is left in {self._limit.longest:,} tokens, as its prompt has "
                    f"{begin:,}; use longer sequences, data.too_long: cut_start or drop, or leave the pair out"
                )
            cut.append(kept)
        if np.array_equal(cut[0][0], cut[1][0]):
            raise DataError(
                f"{where}: chosen and rejected are equal in the {len(cut[0][0]):,} tokens that are kept; "
                "use longer sequences, or leave the pair out"
            )
        lost = [len(ids) - len(kept) for ids, (kept, _) in zip(whole, cut, strict=True)]
        completions = [len(ids) - begin for ids in whole]
        return Sample(
            [ids for ids, _ in cut],
            {"weights": [weights for _, weights in cut]},
            lost,
            spelling=self._texts.spelled(strings_in(record.values)),
            parsed=has_string_arguments(record.values),
            stop=self._tokenizer.stop_of(cut[0][0][cut[0][1]]),
            incomplete=any(np.count_nonzero(kept) < own for own, (_, kept) in zip(completions, cut, strict=True)),
        )

    def _ids(self, pair: Pair, where: str) -> tuple[Ids, list[Ids]]:
        """Token ids of the prompt, and of the prompt with each completion."""
        completions = (pair.chosen, pair.rejected)
        if pair.plain:
            # A completion that already has an end of text does not get a second one.
            texts = [pair.prompt + text.removesuffix(self._texts.end_of_text) for text in completions]
            prompt, *whole = self._texts.encode([pair.prompt, *texts])
            return prompt, [self._texts.ended(ids) for ids in whole]
        if self._template is None:
            raise DataError(
                f"{where} has messages, but there is no chat template with the tokenizer; use strings, or the "
                "tokenizer files of a model trained for conversations"
            )
        conversations = [
            join_conversation(pair.prompt, completion, name, pair.tools, where, self._tool_arguments)
            for name, completion in zip(SIDES, completions, strict=True)
        ]
        quoted = self._texts.quoted
        prompt = encode_prompt(conversations[0], self._template, self._tokenizer, quoted)
        return prompt, [encode(one, self._template, self._tokenizer, "all", quoted)[0] for one in conversations]


def _common(one: Ids, other: Ids) -> int:
    """Number of leading token ids that are equal in both texts."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
