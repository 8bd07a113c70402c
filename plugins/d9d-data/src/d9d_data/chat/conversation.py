"""Conversations: records of a data set, checked and converted to one form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from d9d_core.config import closest
from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json

from d9d_data.config import MessageFormat
from d9d_data.sources.kinds import kind_of

#: Roles of messages.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Keys of reasoning in data sets. Most templates read the first, the template of gpt-oss reads the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]
#: Treatment of tool arguments that are JSON strings, as ``data.tool_arguments`` names it.
ToolArguments = Literal["parse", "keep"]
#: Keys of a message in the format ``messages``.
KEYS = MessageFormat()
_CALL = '{"name": "...", "arguments": {}}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation of a chat, with at least one assistant message.

    Attributes:
        messages: each has a known ``role`` and, unless it has tool calls or reasoning, ``content``: a string or a list
            of parts ``{"type": "text", "text": ...}``. Assistant messages may have a loss ``weight``. Other keys are
            kept as in the record; keys with null are removed.
        tools: JSON schemas of the tools offered; None if no tools are offered.
        prompt: number of leading messages that are never trained on, such as the messages of a record's field
            ``prompt``.
        where: name of the record in error messages, such as ``train.jsonl:17``.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    prompt: int = 0
    where: str = "the conversation"

    @property
    def replies(self) -> tuple[int, ...]:
        """Indices of the assistant messages after the prompt."""
        found = (index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        return tuple(index for index in found if index >= self.prompt)

    @property
    def last_turn(self) -> int:
        """Index of the first message after the last user message that a reply follows; at least ``prompt``."""
        last = self.replies[-1]
        users = (index for index in range(last) if self.messages[index]["role"] == "user")
        return max((self.prompt, *(index + 1 for index in users)))


def join_conversation(
    prompt: object,
    completion: object,
    name: str,
    tools: object,
    where: str,
    arguments: ToolArguments = "keep",
    asked: str = "prompt",
) -> Conversation:
    """Make a conversation of a prompt and its completion.

    Args:
        prompt: string of the user, or list of messages.
        completion: string of the assistant, or list of messages.
        name: name of the record's field with the completion, for error messages.
        tools: list of JSON schemas, as a string or parsed, or None.
        where: name of the record in error messages.
        arguments: treatment of tool arguments that are JSON strings.
        asked: name of the record's field with the prompt, for error messages.

    Raises:
        DataError: prompt, completion or tools are malformed, or the completion has no assistant message.
    """
    before = messages_in(prompt, "user", f"{where}: {asked}", arguments)
    messages = before + messages_in(completion, "assistant", f"{where}: {name}", arguments)
    return checked(Conversation(messages, tools_in(tools, where), len(before), where), name)


def checked(conversation: Conversation, place: str) -> Conversation:
    """Return a conversation unchanged after checking that it has an assistant message after the prompt.

    Args:
        conversation: conversation to check.
        place: name of the record's field with the messages, for the error message.

    Raises:
        DataError: the conversation has no assistant message to train on.
    """
    if not conversation.replies:
        raise DataError(
            f"{conversation.where}: {place} has no assistant message, so there is nothing to train on; "
            "leave the record out"
        )
    return conversation


def text_of(message: Message) -> str:
    """Text of a message's content: the string, or the joined text parts; empty if the message has no content."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def call_names(message: Message) -> list[str]:
    """Names of the functions in the tool calls of a message."""
    return [call.get("function", call)["name"] for call in message.get("tool_calls", ())]


def has_string_arguments(value: object) -> bool:
    """Whether a record contains, at any depth, a message whose tool calls have strings as arguments."""
    if isinstance(value, Mapping):
        calls = value.get("tool_calls")
        if isinstance(calls, list | tuple):
            functions = (call.get("function", call) for call in calls if isinstance(call, Mapping))
            return any(isinstance(one, Mapping) and isinstance(one.get("arguments"), str) for one in functions)
        return any(map(has_string_arguments, value.values()))
    return isinstance(value, list | tuple) and any(map(has_string_arguments, value))


def _parsed(message: Message) -> Message:
    """Message with the tool arguments parsed where they are strings with JSON objects."""
    if not has_string_arguments(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        parsed = (
            {**function, "arguments": _object_in(function.get("arguments"))} if "arguments" in function else function
        )
        calls.append({**call, "function": parsed} if "function" in call else parsed)
    return {**message, "tool_calls": calls}


def _object_in(value: object) -> object:
    """Parse a string that holds a JSON object; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = parse_json(value.encode())
    except ValueError:
        return value
    return found if isinstance(found, dict) else value


def messages_in(
    value: object, role: str, where: str, arguments: ToolArguments, keys: MessageFormat = KEYS
) -> tuple[Message, ...]:
    """Messages of a record's field: a string becomes one message with the given role, a list is a list of messages.

    Args:
        value: string or list of messages.
        role: role of the message that a string becomes.
        where: place of the field in error messages, such as ``train.jsonl:17: prompt``.
        arguments: treatment of tool arguments that are JSON strings.
        keys: keys of the messages of a list, and names of their roles.

    Raises:
        DataError: the value is neither a string nor a list of messages, the list is empty, or a message is malformed.
    """
    if isinstance(value, str):
        return (_message({"role": role, "content": value}, where, KEYS),)
    return messages_of(value, where, arguments, keys)


def messages_of(value: object, where: str, arguments: ToolArguments, keys: MessageFormat = KEYS) -> tuple[Message, ...]:
    """Messages of a list; the list may be a string of JSON, as in a CSV file. See :func:`messages_in`.

    Raises:
        DataError: the value is no list of messages, the list is empty, or a message is malformed.
    """
    value = list_in(value, where)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{where} is {kind_of(value)}, not a list; write [{_shape(keys)}, ...]")
    if not value:
        raise DataError(f"{where} is empty; leave the record out")
    messages = (_message(message, f"{where}[{index}]", keys) for index, message in enumerate(value))
    return tuple(map(_parsed, messages)) if arguments == "parse" else tuple(messages)


def list_in(value: object, where: str) -> object:
    """Value of a field that holds a list, parsed if it is a string of JSON.

    Raises:
        DataError: the string begins like a list, but is not JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value.encode(errors="replace"))
    except ValueError as error:
        raise DataError(f"{where} is a string that is not JSON ({error}); give a list") from error


def _shape(keys: MessageFormat) -> str:
    """Example of a user's message in JSON, for error messages."""
    role = next((name for name, role in keys.roles.items() if role == "user"), "user")
    return f'{{"{keys.role}": "{role}", "{keys.content}": "..."}}'


def _message(value: object, where: str, keys: MessageFormat) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {kind_of(value)}, not an object; write {_shape(keys)}")
    named = {keys.role: "role", keys.content: "content"}
    unused = {"role", "content"} - named.keys()
    message = {
        named.get(str(key), str(key)): item for key, item in value.items() if item is not None and key not in unused
    }
    own = message.get("role")
    known = list(dict.fromkeys([*keys.roles, *ROLES]))
    if own is None:
        fields = ", ".join(str(key) for key, item in value.items() if item is not None) or "none"
        raise DataError(f"{where} has no field '{keys.role}' (it has {fields}); use one of {', '.join(known)}")
    role = message["role"] = keys.roles.get(own, own) if isinstance(own, str) else own
    if own not in known:
        near = closest(own, known)
        hint = f"did you mean '{near}'?" if near else f"use one of {', '.join(known)}"
        raise DataError(f"{where} has the unknown role {str(own)[:80]!r}; {hint}")
    if role == "function_call":
        message, role = _calling(message, f"{where}.{keys.content}"), "assistant"
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            raise DataError(f"{where}.{key} is {kind_of(message[key])}; give a string")
    _check_content(message, f"{where}.{keys.content}")
    _check_calls(message, where)
    _check_weight(message, where)
    if not text_of(message).strip() and role in ("user", "assistant"):
        if role == "user" or not (message.get("tool_calls") or _reasons(message)):
            also = "" if role == "user" else " and neither tool calls nor reasoning"
            raise DataError(f"{where} of the {own} has empty content{also}; fill it or leave the record out")
    elif "content" not in message and role != "assistant":
        fields = ", ".join(map(str, value))
        raise DataError(f"{where} of role '{own}' has no field '{keys.content}' (it has {fields}); give a string")
    return message


def _calling(message: Message, where: str) -> dict[str, Any]:
    """Convert a message of role ``function_call``, whose content is JSON, to an assistant message with tool calls."""
    value = message.get("content")
    if isinstance(value, str):
        try:
            value = parse_json(value.encode(errors="replace"))
        except ValueError as error:
            raise DataError(f"{where} is no tool call in JSON ({error}); write {_CALL}") from error
    calls: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where} is no tool call with a name; write {_CALL}")
    functions = [{"type": "function", "function": dict(call)} for call in calls]
    return {**message, "role": "assistant", "content": "", "tool_calls": functions}


def _check_content(message: Message, where: str) -> None:
    content = message.get("content", "")
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise DataError(f"{where} is {kind_of(content)}; give a string, or a list of text parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}[{index}] is not text ({str(kind)[:80]}); only parts such as "
                '{"type": "text", "text": "..."} can be trained on'
            )


def _check_calls(message: Message, where: str) -> None:
    calls = message.get("tool_calls", ())
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}.tool_calls is {kind_of(calls)}, not a list; write one object for each call")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}.tool_calls[{index}] names no function; write "
                '{"type": "function", "function": {"name": "...", "arguments": {}}}'
            )
    if calls and message["role"] != "assistant":
        raise DataError(f"{where} of role '{message['role']}' has tool calls; only the assistant calls tools")


def _check_weight(message: Message, where: str) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise DataError(f"{where}.weight is {str(weight)[:80]!r}; give a number that is not negative")
    if "weight" in message and message["role"] != "assistant":
        raise DataError(f"{where} of role '{message['role']}' has a weight; only assistant messages are trained on")


def _reasons(message: Message) -> bool:
    """Whether a message has reasoning under any of the known keys."""
    return any(message.get(key) for key in REASONING)


def tools_in(value: object, where: str) -> tuple[Mapping[str, Any], ...] | None:
    """Tools of a record, parsed if they are a string of JSON; ``None`` if there are none.

    Args:
        value: list of JSON schemas, a string of such a list, or ``None``.
        where: name of the record in error messages.

    Raises:
        DataError: the value is no list of JSON schemas.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value.encode(errors="replace")) if value.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: tools is a string that is not JSON ({error}); give a list") from error
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: tools is {kind_of(value)}, not a list; give a list of JSON schemas")
    for index, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise DataError(f"{where}: tools[{index}] is {kind_of(tool)}, not an object; give JSON schemas")
    return tuple(value) or None
