"""Variants of messages: a word put into one of their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_data.chat.conversation import Message

#: Change of a text to one that holds a word.
Put = Callable[[str, str], str]


def put_last(text: str, word: str) -> str:
    """Text with a word after it."""
    return text + word


def put_last_stripped(text: str, word: str) -> str:
    """Text with a word after it, in place of the white space there."""
    return text.rstrip() + word


def put_first(text: str, word: str) -> str:
    """Text with a word before it."""
    return word + text


def put_first_stripped(text: str, word: str) -> str:
    """Text with a word before it, in place of the white space there."""
    return word + text.lstrip()


def put_after_reasoning(text: str, word: str) -> str:
    """Text with a word after the reasoning that it begins with."""
    reasoning, tag, answer = text.rpartition("</think>")
    return reasoning + tag + word + answer


def put_after_reasoning_stripped(text: str, word: str) -> str:
    """Text with a word after the reasoning that it begins with, in place of the white space there."""
    reasoning, tag, answer = text.rpartition("</think>")
    return reasoning + tag + word + answer.lstrip()


#: Ways to put a word last; templates strip contents or do not.
PUT_LAST: tuple[Put, ...] = (put_last, put_last_stripped)
#: Ways to put a word first; templates also take reasoning out of contents.
PUT_FIRST: tuple[Put, ...] = (put_first, put_first_stripped, put_after_reasoning, put_after_reasoning_stripped)


def with_content(message: Message, change: Callable[[str], str], *, last: bool) -> Message:
    """Message whose content, or the last or first of its parts that has text, is changed."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    filled = [index for index, part in enumerate(content) if part["text"].strip()]
    chosen = filled[-1 if last else 0]
    parts = [{**part, "text": change(part["text"])} if index == chosen else part for index, part in enumerate(content)]
    return {**message, "content": parts}


def with_name(message: Message, index: int, change: Callable[[str], str]) -> Message:
    """Message with another name in one of its tool calls."""
    calls: list[Any] = list(message["tool_calls"])
    call = dict(calls[index])
    if "function" in call:
        call["function"] = {**call["function"], "name": change(call["function"]["name"])}
    else:
        call["name"] = change(call["name"])
    calls[index] = call
    return {**message, "tool_calls": calls}
