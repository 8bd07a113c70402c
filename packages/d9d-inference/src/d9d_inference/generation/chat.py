"""Conversation with a model over standard input and output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from d9d_inference.generation.language_model import Decoding, LanguageModel
from d9d_inference.generation.prompts import Prompt


def chat(
    model: LanguageModel,
    decoding: Decoding,
    tools: Sequence[Any] | None,
    system: str | None,
    note: Callable[[str], None],
) -> None:
    """Chat with a model: it answers each line of standard input until it ends; the whole conversation is kept.

    Args:
        model: that answers.
        decoding: how; each reply draws anew from its seed.
        tools: schemas of the tools that the model may call.
        system: first message.
        note: prints a line for people.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it; its text says after how many replies.
        DataError: the conversation has become longer than the model's positions.
    """
    messages: list[Mapping[str, Any]] = []
    replies = 0
    try:
        while (said := _next_line()) is not None:
            if not said.strip():
                continue
            messages.append({"role": "user", "content": said})
            where = f"message {len(messages)} of the conversation"
            ids = model.encode(Prompt(where, {}, messages=messages), tools, system, raw=False)
            model.check_length(ids, decoding.max_new_tokens, where)
            reply = model.stream(ids, decoding)
            messages.append({"role": "assistant", "content": model.text(reply)})
            replies += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after {replies} replies") from None
    note(f"end of input after {replies} replies")


def _next_line() -> str | None:
    """Next line of standard input, asked for on a terminal; ``None`` at its end."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
