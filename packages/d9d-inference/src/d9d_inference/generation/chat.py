"""Conversation with a model on standard input and output."""

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
    """Answer each line of standard input until its end; the model sees the whole conversation.

    Args:
        model: model that answers.
        decoding: decoding settings; each reply is sampled with the same seed.
        tools: schemas of tools that the model may call.
        system: system message.
        note: prints a line for the user.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the conversation; the text has the number of replies.
        DataError: the conversation is longer than the model's positions, or the chat template rejects it.
        BuildError: the model cannot generate with these settings.
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
    """Next line of standard input, with a prompt on a terminal; ``None`` at the end."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
