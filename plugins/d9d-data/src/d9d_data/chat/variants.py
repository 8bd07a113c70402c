"""Variants of messages with a marker in one of their texts; the marker shows where a template renders the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_data.chat.conversation import Message

#: Function (text, marker) that returns the text with the marker put in.
Put = Callable[[str, str], str]


def put_last(text: str, word: str) -> str:
    """Append the marker to a text."""
    return text + word


def put_last_stripped(text: str, word: str) -> str:
    """Replace the trailing white space of a text by the marker."""
    return text.rstrip() + word


def put_first(text: str, word: str) -> str:
    """Put the marker before a text."""
    return word + text


def put_first_stripped(text: str, word: str) -> str:
    """Replace the leading white space of a text by the marker."""
    return word + text.lstrip()


def put_after_reasoning(text: str, word: str) -> str:
    """Put the marker after the reasoning with which a text begins."""
    reasoning, tag, answer = text.rpartition("</think>")
    return reasoning + tag + word + answer


def put_after_reasoning_stripped(text: str, word: str) -> str:
    """Replace the white space after the reasoning with which a text begins by the marker."""
    reasoning, tag, answer = text.rpartition("</think>")
    return reasoning + tag + word + answer.lstrip()


#: Ways to put a marker last, for templates that strip contents and for templates that do not.
PUT_LAST: tuple[Put, ...] = (put_last, put_last_stripped)
#: Ways to put a marker first; some templates also move reasoning out of the content.
PUT_FIRST: tuple[Put, ...] = (put_first, put_first_stripped, put_after_reasoning, put_after_reasoning_stripped)


def with_content(message: Message, change: Callable[[str], str], *, last: bool) -> Message:
    """Message with its content changed; in a list of parts, the last or the first part with text is changed."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    filled = [index for index, part in enumerate(content) if part["text"].strip()]
    chosen = filled[-1 if last else 0]
    parts = [{**part, "text": change(part["text"])} if index == chosen else part for index, part in enumerate(content)]
    return {**message, "content": parts}


def with_name(message: Message, index: int, change: Callable[[str], str]) -> Message:
    """Message with the function name of one tool call changed."""
    calls: list[Any] = list(message["tool_calls"])
    call = dict(calls[index])
    if "function" in call:
        call["function"] = {**call["function"], "name": change(call["function"]["name"])}
    else:
        call["name"] = change(call["name"])
    calls[index] = call
    return {**message, "tool_calls": calls}
