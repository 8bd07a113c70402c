"""Check that a template renders the complete conversation; some templates leave out messages without an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.errors import DataError

from d9d_data.chat.conversation import Conversation, Message, call_names
from d9d_data.chat.template import ChatTemplate
from d9d_data.chat.variants import with_name


def check_complete(conversation: Conversation, template: ChatTemplate, text: str, word: str) -> None:
    """Check that a chat template is complete: it renders every content, every tool call and the tools.

    The function puts a unique marker into each content and into the name of each tool call and tool, and all markers
    must appear in the rendering. If the template refuses the markers, the texts themselves must appear in ``text``.
    Reasoning is not checked, because templates leave out the reasoning of earlier turns on purpose.

    Args:
        conversation: conversation to check.
        template: chat template of the model.
        text: the rendering of the conversation.
        word: beginning of all markers; it occurs neither in the conversation nor in its rendering.

    Raises:
        DataError: the template leaves something out, or renders a list of text parts as a Python list.
    """
    words = _Words(word)
    messages = [words.into_message(index, message) for index, message in enumerate(conversation.messages)]
    tools = None if conversation.tools is None else [words.into_tool(tool) for tool in conversation.tools]
    try:
        changed = template.render(messages, tools).text
    except DataError:  # the template checks contents or names
        changed = None
    for word_of_it, (what, plain) in words.what.items():
        if (word_of_it not in changed) if changed is not None else (plain not in text):
            raise DataError(
                f"{conversation.where}: {template.name} leaves out {what}; "
                "change or leave out the record, or use a template that renders it"
            )
    for word_of_it in words.in_parts:
        if changed is not None and (f"{word_of_it}'}}" in changed or f'{word_of_it}"}}' in changed):
            raise DataError(
                f"{conversation.where}: {template.name} renders the list of parts in {words.what[word_of_it][0]} as "
                "a Python list; write the content as a string"
            )


class _Words:
    """Unique markers put into the texts of a conversation."""

    def __init__(self, word: str) -> None:
        self._word = word
        #: Marker -> description of the text that carries it, for errors, and that text without the marker.
        self.what: dict[str, tuple[str, str]] = {}
        self.in_parts: list[str] = []  # markers in contents that are lists of parts

    def into_message(self, index: int, message: Message) -> Message:
        """Message with a marker in its content and in the name of each tool call."""
        changed = dict(message)
        where = f"the content of message {index} ({message['role']})"
        if isinstance(content := message.get("content", ""), str):
            if content.strip():
                changed["content"] = self._put(where)(content)
        else:
            changed["content"] = [self._into_part(where, part) for part in content]
        for call in range(len(call_names(message))):
            changed = dict(with_name(changed, call, self._put(f"tool call {call} of message {index}")))
        return changed

    def into_tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        """Tool with a marker in its name; a tool without a name is returned unchanged."""
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        named = {**function, "name": self._put("the tools")(function["name"])}
        return {**tool, "function": named} if "function" in tool else named

    def _into_part(self, where: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if not part["text"].strip():
            return part
        changed = {**part, "text": self._put(where)(part["text"])}
        self.in_parts.append(next(reversed(self.what)))
        return changed

    def _put(self, what: str) -> Callable[[str], str]:
        """Make a function that appends a new marker to a text; ``what`` describes the text in errors."""

        def put(text: str) -> str:
            word = f"{self._word}{len(self.what)}x"
            # Keep only the text after the reasoning, because chat templates move the reasoning out of a message's
            # content.
            self.what[word] = (what, text.rpartition("</think>")[2].strip())
            return text.rstrip() + word

        return put
