"""Formats of records: fields of conversations and of preference pairs, by name, and the format that a record has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from d9d_core.errors import DataError

from d9d_data.chat.conversation import (
    Conversation,
    Message,
    ToolArguments,
    checked,
    list_in,
    messages_in,
    messages_of,
    tools_in,
)
from d9d_data.config import ChatFormat, MessageFormat, PreferenceFormat, Role
from d9d_data.sources.kinds import kind_of
from d9d_data.sources.place import Record
from d9d_data.sources.records import value_in

F = TypeVar("F", ChatFormat, PreferenceFormat)
_SHAREGPT: dict[str, Role] = {
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
#: Formats of conversations by name, each in one or several variants.
CHAT_FORMATS: Mapping[str, tuple[ChatFormat, ...]] = {
    "messages": (ChatFormat(messages="messages"),),
    "sharegpt": (
        ChatFormat(messages="conversations", role="from", content="value", roles=_SHAREGPT, system="system"),
        ChatFormat(messages="conversations", roles=_SHAREGPT, system="system"),
    ),
    "alpaca": (
        ChatFormat(user="instruction", context="input", assistant="output", system="system", history="history"),
    ),
    "prompt_completion": (
        ChatFormat(user="prompt", assistant="completion", system="system"),
        ChatFormat(user="prompt", assistant="response", system="system"),
    ),
    "question_answer": (
        ChatFormat(user="question", assistant="answer", system="system"),
        ChatFormat(user="question", assistant="response", system="system_prompt"),
        ChatFormat(user="query", assistant="response", system="system"),
        ChatFormat(user="instruction", context="context", assistant="response", system="system"),
        ChatFormat(user="input", assistant="output", system="system"),
    ),
}
#: Formats of preference pairs by name.
PREFERENCE_FORMATS: Mapping[str, tuple[PreferenceFormat, ...]] = {
    "prompt": (PreferenceFormat(prompt="prompt"),),
    "question": (PreferenceFormat(user="question", system="system"),),
    "instruction": (PreferenceFormat(user="instruction", context="input", system="system"),),
    "sharegpt": (
        PreferenceFormat(prompt="conversations", role="from", content="value", roles=_SHAREGPT, system="system"),
        PreferenceFormat(prompt="conversations", roles=_SHAREGPT, system="system"),
    ),
    "dialogues": (
        PreferenceFormat(),
        PreferenceFormat(role="from", content="value", roles=_SHAREGPT),
    ),
}
#: Formats found without a printed note: most of their variants have the keys and roles that chat templates use.
SILENT = ("messages", "prompt", "dialogues")
#: Name of a format whose fields the job file names.
MAPPED = "mapped fields"
_SHOWN = 100  # characters of a record in a note


@dataclass(frozen=True, slots=True)
class Found(Generic[F]):
    """Format of a dataset's records.

    Attributes:
        name: name of the format; :data:`MAPPED` if the job file names the fields.
        fields: fields of the format.
    """

    name: str
    fields: F

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(required(self.fields))})"


def required(fields: MessageFormat) -> list[str]:
    """Fields that every record of a format has."""
    if isinstance(fields, ChatFormat):
        wanted = [fields.messages, fields.user, fields.assistant]
    else:
        assert isinstance(fields, PreferenceFormat)
        wanted = [fields.prompt, fields.user, fields.chosen, fields.rejected]
    return [field for field in wanted if field is not None]


def used_fields(fields: ChatFormat | PreferenceFormat) -> set[str]:
    """Fields of a record that a format reads, except its tools."""
    return {*required(fields), *_optional(fields)}


def chat_format_of(record: Record, names: Sequence[str] = tuple(CHAT_FORMATS)) -> Found[ChatFormat]:
    """Format of conversations that a record has.

    Args:
        record: first record of a dataset.
        names: formats to choose from.

    Raises:
        DataError: the record has none of the formats, or several.
    """
    return _format_of(record, {name: CHAT_FORMATS[name] for name in names}, "{user: question, assistant: answer}")


def preference_format_of(record: Record, names: Sequence[str] = tuple(PREFERENCE_FORMATS)) -> Found[PreferenceFormat]:
    """Format of preference pairs that a record has.

    Args:
        record: first record of a dataset.
        names: formats to choose from.

    Raises:
        DataError: the record has none of the formats, or several.
    """
    example = "{user: question, chosen: better, rejected: worse}"
    return _format_of(record, {name: PREFERENCE_FORMATS[name] for name in names}, example)


def name_of(fields: F, formats: Mapping[str, tuple[F, ...]]) -> str:
    """Name of a format; :data:`MAPPED` if it has none."""
    return next((name for name, variants in formats.items() if fields in variants), MAPPED)


def told(found: Found[F], record: Record, selector: str) -> str:
    """Line to print about the format that the first record of a dataset has.

    Args:
        found: the format.
        record: the first record, which the line shows.
        selector: name of the dataset.
    """
    shown = json.dumps(_shortened(record.values), ensure_ascii=False, default=str)
    shown = shown.encode(errors="backslashreplace").decode()  # half of a surrogate pair cannot be printed
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    used = used_fields(found.fields)
    names = ", ".join(field for field, value in record.values.items() if field in used and value is not None)
    return f"{selector}: records are read as {found.name} ({names}), by the first: {shown}"


def check_fields(values: Mapping[str, Any], fields: F, formats: Mapping[str, tuple[F, ...]], where: str) -> None:
    """Raise unless a record has the fields of the dataset's format.

    Args:
        values: values of the record by field.
        fields: format of the dataset.
        formats: known formats by name, for the error message.
        where: name of the record in error messages, such as ``train.jsonl:17``.

    Raises:
        DataError: a field is missing; the message names it.
    """
    for field in required(fields):
        if value_in(values, field) is None:
            found = Found(name_of(fields, formats), fields)
            raise DataError(
                f"{where} has no field '{field}' (it has {_fields(values)}), but the records of this dataset are read "
                f"as {found}; give all records the same fields, or name another format in data.format"
            )


def read_conversation(
    record: object, where: str, arguments: ToolArguments = "keep", fields: ChatFormat | None = None
) -> Conversation:
    """Make a conversation of a record.

    Args:
        record: parsed JSON.
        where: name of the record in error messages, such as ``train.jsonl:17``.
        arguments: treatment of tool arguments that are JSON strings.
        fields: format of the record; detected from the record's fields if absent.

    Raises:
        DataError: the record is not a conversation; the error says how to write one.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is {kind_of(record)}, not an object; write one such as {_EXAMPLE}")
    if fields is None:
        fields = _matching(record, where, CHAT_FORMATS, _MAP).fields
    check_fields(record, fields, CHAT_FORMATS, where)
    system = system_message(record, fields, where)
    tools = tools_in(value_in(record, fields.tools), where)
    if fields.messages is not None:
        place = fields.messages
        messages = messages_of(value_in(record, place), f"{where}: {place}", arguments, fields)
        return checked(Conversation((*system, *alone(messages, system, where, fields, place)), tools, 0, where), place)
    assert fields.user is not None
    assert fields.assistant is not None
    asked = user_messages(record, fields, where, arguments)
    earlier = tuple(_history(record, fields, where))
    place = fields.assistant
    answer = messages_in(value_in(record, place), "assistant", f"{where}: {place}", arguments, fields)
    before = (*system, *earlier, *alone(asked, system, where, fields, fields.user))
    # With earlier turns, all answers are trained on, so no message counts as prompt.
    given = 0 if earlier else len(before)
    return checked(Conversation((*before, *answer), tools, given, where), place)


def system_message(values: Mapping[str, Any], fields: MessageFormat, where: str) -> tuple[Message, ...]:
    """System message of a record that has its text in a field; empty if there is none.

    Raises:
        DataError: the field is not a text.
    """
    text = None if fields.system is None else value_in(values, fields.system)
    if text is None:
        return ()
    if not isinstance(text, str):
        raise DataError(f"{where}: {fields.system} is {kind_of(text)}; give a string")
    return ({"role": "system", "content": text},) if text.strip() else ()


def alone(
    messages: tuple[Message, ...], system: tuple[Message, ...], where: str, fields: MessageFormat, place: str
) -> tuple[Message, ...]:
    """Return the messages, after a check that they have no system message if the record's system field has one.

    Raises:
        DataError: the messages and the system field both have a system message.
    """
    second = next((index for index, message in enumerate(messages) if message["role"] == "system"), None)
    if system and second is not None:
        raise DataError(f"{where}: {fields.system} and {place}[{second}] are two system messages; remove one")
    return messages


def user_messages(
    values: Mapping[str, Any], fields: ChatFormat | PreferenceFormat, where: str, arguments: ToolArguments
) -> tuple[Message, ...]:
    """Messages of the field ``user``: a text with its context, or a list of messages.

    Raises:
        DataError: a text or message is malformed or empty, or a context follows a list of messages.
    """
    assert fields.user is not None
    asked = value_in(values, fields.user)
    context = None if fields.context is None else value_in(values, fields.context)
    if context is not None and not isinstance(context, str):
        raise DataError(f"{where}: {fields.context} is {kind_of(context)}; give a string")
    if context and context.strip():
        if not isinstance(asked, str):
            raise DataError(f"{where}: {fields.user} is {kind_of(asked)}, so {fields.context} cannot follow it")
        asked = f"{asked}\n{context}" if asked.strip() else context
    return messages_in(asked, "user", f"{where}: {fields.user}", arguments, fields)


def _history(values: Mapping[str, Any], fields: ChatFormat, where: str) -> Iterator[Message]:
    """Messages of earlier turns."""
    if fields.history is None:
        return
    place = f"{where}: {fields.history}"
    turns = list_in(value_in(values, fields.history) or [], place)
    if not isinstance(turns, list | tuple):
        raise DataError(f"{place} is {kind_of(turns)}, not a list; give pairs of a question and an answer")
    for index, turn in enumerate(turns):
        if not isinstance(turn, list | tuple) or [type(part) for part in turn] != [str, str]:
            raise DataError(f'{place}[{index}] is no pair of texts; write ["question", "answer"]')
        for number, (role, text) in enumerate(zip(("user", "assistant"), turn, strict=True)):
            yield from messages_in(text, role, f"{place}[{index}][{number}]", "keep")


_MAP = "{user: question, assistant: answer}"
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def _format_of(record: Record, formats: Mapping[str, tuple[F, ...]], example: str) -> Found[F]:
    return _matching(record.values, str(record.place), formats, example)


def _matching(values: Mapping[str, Any], where: str, formats: Mapping[str, tuple[F, ...]], example: str) -> Found[F]:
    """The format whose fields have values in a record; raises ``DataError`` for none or several."""
    found = [match for name, variants in formats.items() for match in _variants(values, name, variants)]
    # A format that uses the fields of another as well, as alpaca uses input and output, is the better match.
    best = [one for one in found if not any(_within(one.fields, other.fields) for other in found if other is not one)]
    if len(best) == 1:
        return best[0]
    if not best:
        raise DataError(
            f"{where} has the fields of no known format (it has {_fields(values)}); the formats are "
            f"{'; '.join(_listed(formats))}; rename the fields, or name them in the job file: 'format: {example}'"
        )
    names = [one.name for one in best]
    named = " or ".join(f"'format: {name}'" for name in names)
    choice = named if len(set(names)) == len(names) else f"its fields, such as 'format: {example}'"
    raise DataError(
        f"{where} has the fields of several formats, {' and '.join(map(str, best))}; choose one in data: {choice}"
    )


def _variants(values: Mapping[str, Any], name: str, variants: Iterable[F]) -> Iterator[Found[F]]:
    """Yield the variants of a format whose fields have values; of variants with the same fields only one."""
    groups: dict[tuple[str, ...], list[F]] = {}
    for fields in variants:
        if all(value_in(values, field) is not None for field in required(fields)):
            groups.setdefault(tuple(required(fields)), []).append(fields)
    for (place, *_), group in groups.items():
        first = _first_message(value_in(values, place))
        yield Found(name, next((fields for fields in group if fields.role in first), group[0]))


def _first_message(value: object) -> Mapping[str, Any]:
    """First message of a list, which may be a string of JSON, or a single message itself; empty if there is none."""
    try:
        value = list_in(value, "")
    except DataError:
        return {}
    first = next(iter(value), None) if isinstance(value, list | tuple) else value
    return first if isinstance(first, Mapping) else {}


def _within(fields: F, other: F) -> bool:
    """Whether ``other`` has all fields that ``fields`` requires, and requires a field that ``fields`` does not."""
    mine, theirs = set(required(fields)), set(required(other))
    return mine < theirs or (mine <= theirs | _optional(other) and not theirs <= mine)


def _optional(fields: ChatFormat | PreferenceFormat) -> set[str]:
    """Fields of a format that a record may lack."""
    named = [fields.system, fields.context, fields.history if isinstance(fields, ChatFormat) else None]
    return {field for field in named if field is not None}


def _listed(formats: Mapping[str, tuple[F, ...]]) -> Iterator[str]:
    for name, variants in formats.items():
        fields = dict.fromkeys(" and ".join(required(fields)) for fields in variants)
        yield f"{name} ({', or '.join(fields)})"


def _fields(values: Mapping[str, Any]) -> str:
    """Names of a record's fields that have values."""
    return ", ".join(str(key)[:40] for key, value in islice(values.items(), 20) if value is not None) or "none"


def _shortened(value: Any) -> Any:
    """Value with long texts and lists cut, so that a long record is quick to print."""
    if isinstance(value, str):
        return value[:_SHOWN]
    if isinstance(value, Mapping):
        return {str(key)[:_SHOWN]: _shortened(item) for key, item in islice(value.items(), 20)}
    return [_shortened(item) for item in value[:20]] if isinstance(value, list | tuple) else value
