"""Locate the replies in a rendered conversation: the characters that the model is to generate.

A template with generation blocks marks the replies itself. Otherwise a reply begins where the rendering of the messages
before the reply, with the generation prompt, ends; and the reply ends where the rendering of the messages up to and
including the reply ends. These positions are right if both renderings are prefixes of the whole rendering. Some
templates render a message differently if other messages follow: they remove the reasoning of earlier turns, or write
an end of text only after the last message. For such templates, probes find the positions: a unique marker is put into
one message. If the rendering with the marker removed equals the rendering without the marker, the position of the
marker is confirmed. A position that no probe confirms is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os.path import commonprefix

from d9d_core.errors import DataError

from d9d_data.chat.complete import check_complete
from d9d_data.chat.conversation import REASONING, Conversation, Message, call_names, text_of
from d9d_data.chat.template import ChatTemplate, Span
from d9d_data.chat.variants import PUT_FIRST, PUT_LAST, Put, put_last, with_content, with_name

_USE_BLOCKS = "use a template with {% generation %} blocks around the assistant's replies"


def find_replies(
    conversation: Conversation, template: ChatTemplate, added: Iterable[str], first: int
) -> tuple[str, list[Span]]:
    """Render a conversation and find the character spans ``[begin, end)`` that the assistant writes.

    A reply is everything after the generation prompt up to the end of the turn: reasoning, content, tool calls and the
    token that ends the turn. White space after that token is left out, because no model generates it. If the template
    writes no end token after replies, a reply ends with the special token that opens the next message, and the last
    reply has no end token. If the template has generation blocks, they are the replies.

    Args:
        conversation: conversation to render.
        template: chat template of the model.
        added: texts of the tokenizer's added tokens, including special tokens.
        first: index of the first message whose replies count; the number of messages if no reply counts.

    Raises:
        DataError: the template fails, leaves out a message, or does not let the replies be located.
    """
    probe = _Probe(conversation, template, added)
    check_complete(conversation, template, probe.text, probe.word)
    if first >= len(conversation.messages):
        return probe.text, []
    replies = [index for index in conversation.replies if index >= first]
    if probe.marks is not None:
        probe.check_marks(probe.marks)
        begin = probe.end_before(first) if first else 0
        return probe.text, [span for span in probe.marks if span[0] >= begin]
    spans: list[Span] = []
    for index in replies:
        begin = probe.begin_of(index)
        end = probe.end_of(index, begin)
        if begin >= end or (spans and begin < spans[-1][1]):
            raise probe.unverified(index, "the text of this reply is empty or overlaps another reply")
        probe.check_reply(index, begin, end)
        spans.append((begin, probe.stop_of(begin, end)))
    return probe.text, spans


class _Probe:
    """Renderings of variants of a conversation, compared with the rendering of the conversation itself."""

    def __init__(self, conversation: Conversation, template: ChatTemplate, added: Iterable[str]) -> None:
        self._conversation = conversation
        self._template = template
        rendering = template.render(conversation.messages, conversation.tools, where=conversation.where)
        self.text, self.marks = rendering.text, rendering.marks
        known = {token for token in (*added, *template.special_tokens.values()) if token.strip()}
        self._special = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))) or r"(?!)")
        texts = f"{self.text} {conversation.messages} {conversation.tools}"
        self._ends: dict[str, bool] = {}
        number = 0
        while (word := f"zq{number}probe") in texts:
            number += 1
        #: Marker that occurs in neither the conversation nor its rendering.
        self.word = word

    def begin_of(self, index: int) -> int:
        """Position where a reply begins.

        Raises:
            DataError: the position cannot be determined.
        """
        before = self._conversation.messages[:index]
        prompt = self._render(before, prompt=True) if before else None
        if prompt is not None and self.text.startswith(prompt):
            return self._after_header(index, prompt, len(prompt))
        content = self._place_of_content(index)
        for put in PUT_LAST if prompt is not None else ():
            here, there = self._place(index - 1, put), self._place(index - 1, put, before, (prompt or "", True))
            if here is None or there is None or prompt is None:
                continue
            header = prompt[there:]
            common = here + self._common(header, self.text[here:])
            if common == here + len(header):
                return self._after_header(index, prompt, common if content is None else min(common, content))
            # Here the generation prompt continues with text that this reply lacks: the start of its reasoning.
            if content is not None and here < content <= common:
                return content
        if content is not None and not self._shows_reasoning(index):
            return content
        raise self.unverified(index, "the template renders the messages before the reply differently without the reply")

    def end_of(self, index: int, begin: int) -> int:
        """Position where a reply that begins at ``begin`` ends.

        Raises:
            DataError: the position cannot be determined.
        """
        upto = self._conversation.messages[: index + 1]
        turn = self._render(upto)
        if turn is None:
            raise self.unverified(index, "the template does not render the messages up to the reply alone")
        if self.text.startswith(turn) and len(turn) > begin:
            return len(turn)
        for put in PUT_LAST:
            here, there = self._place(index, put), self._place(index, put, upto, (turn, False))
            if here is None or there is None or here < begin:
                continue
            tail, rest = turn[there:], self.text[here:]
            common = self._common(tail, rest)
            left = tail[common:]
            if not left or (common and not self._special.sub("", left).strip()):
                return here + common
            ends, goes_on = self._special.match(tail), self._special.match(rest)
            # The last turn ends with its own token; the other turns end with the token that ends user messages.
            if ends and goes_on and not tail[ends.end() :].strip() and self._ends_others(goes_on.group()):
                return here + goes_on.end()
        raise self.unverified(index, "the template renders the reply differently if further messages follow")

    def end_before(self, first: int) -> int:
        """Position in the rendering that separates the replies before message ``first`` from the later replies.

        Raises:
            DataError: the position cannot be determined.
        """
        before = self._render(self._conversation.messages[:first])
        if before is not None and self.text.startswith(before):
            return len(before)
        for put in PUT_LAST:
            if (place := self._place(first - 1, put)) is not None:
                return place
        raise self.unverified(
            first - 1, "the template renders the messages up to this one differently if further messages follow"
        )

    def check_reply(self, index: int, begin: int, end: int) -> None:
        """Check that a reply holds the content and the names of the tool calls of its message.

        Raises:
            DataError: the reply lacks the content or the name of a tool call.
        """
        message, reply = self._conversation.messages[index], self.text[begin:end]
        content = text_of(message).split("</think>")[-1].strip()
        if content not in reply:
            places = [self._place(index, put) for put in PUT_LAST]
            if not any(place is not None and begin <= place <= end for place in places):
                raise self.unverified(index, "the template renders content of this reply outside of the reply")
        for name in call_names(message):
            if name not in reply:
                raise self.unverified(index, "the template renders tool calls of this reply outside of the reply")

    def check_marks(self, marks: Iterable[Span]) -> None:
        """Check that no generation block marks a message of another role than the assistant.

        Raises:
            DataError: a block is the text of such a message, so the model would learn to write the user's messages.
        """
        messages = self._conversation.messages
        marked = {self._special.sub("", self.text[begin:end]).strip() for begin, end in marks}
        for message in messages:
            if message["role"] == "assistant":
                # A block in ``marked`` has no special tokens, so the reply without its special tokens is removed, too.
                reply = text_of(message)
                marked -= {reply.strip(), self._special.sub("", reply).strip()}
        marked -= {""}
        for index, message in enumerate(messages):
            if message["role"] != "assistant" and text_of(message).strip() in marked:
                raise DataError(
                    f"{self._conversation.where}: {self._template.name} puts message {index} ({message['role']}) into "
                    "a generation block, so the model would learn it as a reply; put the blocks of the template inside "
                    "{% if message.role == 'assistant' %} ... {% endif %}"
                )

    def stop_of(self, begin: int, end: int) -> int:
        """End of a reply, including the token that stops generation, without white space after it.

        If the template ends replies without a special token, the token that opens the next message stops generation.
        """
        stripped = begin + len(self.text[begin:end].rstrip())
        if any(match.end() == stripped for match in self._special.finditer(self.text, begin, end)):
            return stripped
        opens = self._special.match(self.text, end)
        return opens.end() if opens else end

    def unverified(self, index: int, reason: str) -> DataError:
        """Make the error about a reply that cannot be located in the rendering."""
        return DataError(
            f"{self._conversation.where}: cannot locate the reply of message {index} in the text that "
            f"{self._template.name} renders: {reason}; {_USE_BLOCKS}"
        )

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """Render messages; returns None if the template refuses them."""
        try:
            return self._template.render(messages, self._conversation.tools, generation_prompt=prompt).text
        except DataError:
            return None

    def _place(
        self, index: int, put: Put, messages: Sequence[Message] = (), rendered: tuple[str, bool] | None = None
    ) -> int | None:
        """Position in a rendering of a marker, put into a message's text or else into the name of its last tool call.

        Args:
            index: index of the message.
            put: function that puts the marker into the text, for example at its end.
            messages: messages to render; the whole conversation if empty.
            rendered: rendering of these messages without the marker, and whether it ends with the generation prompt.

        Returns:
            The position; None if the message has neither text nor tool calls, or if the marker does not appear in the
            rendering or changes the text around it.
        """
        messages = messages or self._conversation.messages
        text, prompt = rendered or (self.text, False)
        message = messages[index]
        if text_of(message).strip():
            changed = with_content(message, lambda value: put(value, self.word), last=put in PUT_LAST)
        elif names := call_names(message):
            changed = with_name(message, len(names) - 1, lambda name: put(name, self.word))
        else:
            return None
        probed = self._render([*messages[:index], changed, *messages[index + 1 :]], prompt=prompt)
        if probed is None or self.word not in probed or probed.replace(self.word, "") != text:
            return None
        return probed.index(self.word)

    def _place_of_content(self, index: int) -> int | None:
        """Position where the content of a message begins, or would begin if the content is empty; None if unknown."""
        message = self._conversation.messages[index]
        if text_of(message).strip():
            places = (self._place(index, put) for put in PUT_FIRST)
            return next((place for place in places if place is not None), None)
        probed = self._render_with(index, {"role": message["role"], "content": self.word})
        place = -1 if probed is None else probed.find(self.word)
        return place if probed is not None and place >= 0 and self.text.startswith(probed[:place]) else None

    def _after_header(self, index: int, prompt: str, begin: int) -> int:
        """Position where a reply begins: after its message's role header, if the generation prompt has no header."""
        said = text_of(self._conversation.messages[index]).strip()
        if self.text[begin:].lstrip().startswith(said) or prompt != self._render(self._conversation.messages[:index]):
            return begin
        content = self._place_of_content(index) or begin
        return content if self.text[begin:content].strip() and not self._shows_reasoning(index) else begin

    def _shows_reasoning(self, index: int) -> bool:
        """Whether the rendering depends on the reasoning of a message."""
        message = self._conversation.messages[index]
        changed = {key: value + self.word for key, value in message.items() if key in REASONING}
        if "</think>" in text_of(message):
            changed["content"] = text_of(message).split("</think>")[-1].lstrip()
        return bool(changed) and self._render_with(index, {**message, **changed}) != self.text

    def _render_with(self, index: int, message: Message) -> str | None:
        """Render the conversation with one message replaced."""
        messages = self._conversation.messages
        return self._render([*messages[:index], message, *messages[index + 1 :]])

    def _common(self, one: str, other: str) -> int:
        """Length in characters of the common prefix of two texts, without an incomplete special token at its end."""
        size = len(commonprefix([one, other]))  # noqa: RUF071 - of characters
        matches = (match for text in (one, other) for match in self._special.finditer(text))
        return min((match.start() for match in matches if match.start() < size < match.end()), default=size)

    def _ends_others(self, token: str) -> bool:
        """Whether an added token, such as an end of turn, follows the content of every user message."""
        if token in self._ends:
            return self._ends[token]
        messages = self._conversation.messages
        others = [index for index, message in enumerate(messages) if message["role"] == "user"]
        places = [self._place(index, put_last) for index in others]
        found = [place for place in places if place is not None]
        self._ends[token] = bool(found) and all(self.text.startswith(token, place) for place in found)
        return self._ends[token]
