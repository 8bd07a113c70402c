"""Conversations: records of a data set, checked and converted to one form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from d9d_core.config import closest
from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json

#: Roles of messages.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Keys of reasoning in data sets. Most templates read the first, the template of gpt-oss reads the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]
#: Treatment of tool arguments that are JSON strings, as ``data.tool_arguments`` names it.
ToolArguments = Literal["parse", "keep"]
_SHAPE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation of a chat, with at least one assistant message.

    Attributes:
        messages: each has a known ``role`` and, unless it has tool calls or reasoning, ``content``: a string or a list
            of parts ``{"type": "text", "text": ...}``. Assistant messages may have a loss ``weight``. Other keys are
            kept as in the record; keys with null are removed.
        tools: JSON schemas of the tools offered; None if no tools are offered.
        prompt: number of leading messages that are never trained on, such as the messages of a ``prompt``.
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
        """Index of the message after the last user message that an assistant message follows."""
        last = self.replies[-1]
        users = (index for index in range(last) if self.messages[index]["role"] == "user")
        return max((self.prompt, *(index + 1 for index in users)))


def read_conversation(record: object, where: str, arguments: ToolArguments = "keep") -> Conversation:
    """Make a conversation of a record with ``messages``, or with ``prompt`` and ``completion``; ``tools`` are optional.

    ``messages`` takes precedence over ``prompt`` and ``completion``. An empty list of tools counts as no tools.

    Args:
        record: parsed JSON.
        where: name of the record in error messages, such as ``train.jsonl:17``.
        arguments: treatment of tool arguments that are JSON strings.

    Raises:
        DataError: the record is not a conversation; the error shows the expected form.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is {_kind(record)}, not an object; write one such as {_SHAPE}")
    if record.get("messages") is not None:
        messages = _messages(record["messages"], f"{where}: messages", arguments)
        return _checked(Conversation(messages, _tools(record.get("tools"), where), 0, where), "messages")
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion, tools = record["prompt"], record["completion"], record.get("tools")
        return join_conversation(prompt, completion, "completion", tools, where, arguments)
    fields = ", ".join(str(key) for key, value in record.items() if value is not None) or "none"
    raise DataError(
        f"{where} has neither a field 'messages' nor the fields 'prompt' and 'completion' (it has {fields}); "
        f"write records such as {_SHAPE}"
    )


def join_conversation(
    prompt: object, completion: object, name: str, tools: object, where: str, arguments: ToolArguments = "keep"
) -> Conversation:
    """Make a conversation of a prompt and its completion.

    Args:
        prompt: string of the user, or list of messages.
        completion: string of the assistant, or list of messages.
        name: field of the completion, for error messages.
        tools: list of JSON schemas, as a string or parsed, or None.
        where: name of the record in error messages.
        arguments: treatment of tool arguments that are JSON strings.

    Raises:
        DataError: a part is malformed, or the completion has no assistant message.
    """
    before = _side(prompt, "user", f"{where}: prompt", arguments)
    messages = before + _side(completion, "assistant", f"{where}: {name}", arguments)
    return _checked(Conversation(messages, _tools(tools, where), len(before), where), name)


def _checked(conversation: Conversation, place: str) -> Conversation:
    """Return the conversation; raise if it has no assistant message to train on."""
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


def _side(value: object, role: str, where: str, arguments: ToolArguments) -> tuple[Message, ...]:
    """Messages of a prompt or a completion; a string becomes one message of the role."""
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value, where, arguments)


def _messages(value: object, where: str, arguments: ToolArguments) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{where} is {_kind(value)}, not a list; write {_SHAPE}")
    if not value:
        raise DataError(f"{where} is empty; leave the record out")
    messages = (_message(message, f"{where}[{index}]") for index, message in enumerate(value))
    return tuple(map(_parsed, messages)) if arguments == "parse" else tuple(messages)


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f'{where} is {_kind(value)}, not an object; write {{"role": "user", "content": "..."}}')
    message = {str(key): item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role is None:
        fields = ", ".join(message) or "none"
        raise DataError(f"{where} has no field 'role' (it has {fields}); use one of {', '.join(ROLES)}")
    if role not in ROLES:
        near = closest(role, ROLES)
        hint = f"did you mean '{near}'?" if near else f"use one of {', '.join(ROLES)}"
        raise DataError(f"{where} has the unknown role {str(role)[:80]!r}; {hint}")
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            raise DataError(f"{where}.{key} is {_kind(message[key])}; give a string")
    _check_content(message, where)
    _check_calls(message, where)
    _check_weight(message, where)
    if not text_of(message).strip() and role in ("user", "assistant"):
        if role == "user" or not (message.get("tool_calls") or _reasons(message)):
            also = "" if role == "user" else " and neither tool calls nor reasoning"
            raise DataError(f"{where} of the {role} has empty content{also}; fill it or leave the record out")
    elif "content" not in message and role != "assistant":
        raise DataError(f"{where} of role '{role}' has no field 'content' (it has {', '.join(message)}); give a string")
    return message


def _check_content(message: Message, where: str) -> None:
    content = message.get("content", "")
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise DataError(f"{where}.content is {_kind(content)}; give a string, or a list of text parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}.content[{index}] is not text ({str(kind)[:80]}); only parts such as "
                '{"type": "text", "text": "..."} can be trained on'
            )


def _check_calls(message: Message, where: str) -> None:
    calls = message.get("tool_calls", ())
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}.tool_calls is {_kind(calls)}, not a list; write one object for each call")
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


def _tools(value: object, where: str) -> tuple[Mapping[str, Any], ...] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value.encode()) if value.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: tools is a string that is not JSON ({error}); give a list") from error
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: tools is {_kind(value)}, not a list; give a list of JSON schemas")
    for index, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise DataError(f"{where}: tools[{index}] is {_kind(tool)}, not an object; give JSON schemas")
    return tuple(value) or None


def _kind(value: object) -> str:
    """Name of a value's type in JSON, such as ``a list``, for error messages."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        str: "a string",
        list: "a list",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")
