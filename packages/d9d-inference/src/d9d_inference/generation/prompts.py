"""Prompts and tool schemas from JSON files, with checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular

#: Fields that an output line has in addition to its prompt's fields.
ADDED = ("completion", "tokens", "finish")
#: Largest number of malformed lines that a message lists.
_MOST = 10


@dataclass(frozen=True)
class Prompt:
    """Prompt of one completion.

    Attributes:
        where: origin of the prompt, such as ``file:line``, for error messages.
        fields: all fields of the line; empty for prompts that are not from a file.
        text: text to continue or answer; ``None`` if there are messages.
        messages: conversation to answer; each message has ``role`` and ``content``.
        tools: schemas of tools that the model may call; ``None`` for the command's tools.
    """

    where: str
    fields: Mapping[str, Any]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a file of JSON lines; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, has no prompt, or has malformed lines, which are listed.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; name a file of JSON lines") from error
    prompts, problems = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        if problem := next(_problems(value), None):
            problems.append(f"{path}:{number}: {problem}")
        else:
            text, messages = value.get("prompt"), value.get("messages", ())
            prompts.append(Prompt(f"{path}:{number}", value, text, messages, value.get("tools")))
    if problems:
        more = [f"and {len(problems) - _MOST} more lines"] if len(problems) > _MOST else []
        raise DataError("\n".join([*problems[:_MOST], *more]))
    if not prompts:
        raise DataError(f'the file {path} has no prompt; write lines such as {{"prompt": "Once upon a time"}}')
    return prompts


def read_tools(path: Path) -> list[Any]:
    """Read tool schemas from a JSON file: a list of objects, as chat templates expect.

    Raises:
        DataError: the file cannot be read, or has another structure.
    """
    try:
        tools = parse_json(read_regular(path))
    except OSError as error:
        raise DataError(f"--tools: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"--tools: {path} is not JSON: {error}; write a JSON list of schemas") from error
    if problem := _problem_of_tools(tools):
        raise DataError(f"--tools: {path}: {problem}")
    return list(tools)


def _problems(value: Any) -> Iterator[str]:
    """Yield descriptions of the problems in a line's value."""
    if not isinstance(value, dict):
        yield f"a line must hold a JSON object, not {_kind(value)}"
        return
    for name in ADDED:
        if name in value:
            yield f"'{name}' is a field of the output; rename it"
    if ("prompt" in value) == ("messages" in value):
        yield "a line needs either 'prompt' or 'messages'"
    text, messages = value.get("prompt", "text"), value.get("messages", [{"role": "user", "content": "text"}])
    if not isinstance(text, str) or not text:
        yield f"'prompt' must be a non-empty text, not {_kind(text)}"
    if not isinstance(messages, list) or not messages:
        yield f"'messages' must be a non-empty list, not {_kind(messages)}"
        return
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            yield f"messages[{number}] must be an object with 'role' and 'content'"
        elif "content" not in message and "tool_calls" not in message:
            yield f"messages[{number}] has no 'content'"
    if value.get("tools") is not None and (problem := _problem_of_tools(value["tools"])):
        yield f"'tools': {problem}"


def _problem_of_tools(tools: Any) -> str | None:
    if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools):
        return None
    return f"must be a list of tool schemas, each an object, not {_kind(tools)}"


def _kind(value: Any) -> str:
    if value in ("", [], {}):
        return "an empty one"
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
