"""Probes of a rendered conversation, with functions as templates: begins and ends of replies, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.chat.conversation import Conversation, Message
from d9d_data.chat.mask import _Probe

Render = Callable[[Sequence[Message]], str]


def turns(messages: Sequence[Message]) -> str:
    return "".join(f"<{message['role']}>{message.get('content', '')}" for message in messages)


def numbered(messages: Sequence[Message]) -> str:
    """No rendering of fewer messages is the beginning of one of more."""
    return f"{len(messages)}:{turns(messages)}"


def contents_last(messages: Sequence[Message]) -> str:
    return turns([{**message, "content": ""} for message in messages]) + "|".join(str(m["content"]) for m in messages)


def probe(render: Render, *messages: Message, special: Sequence[str] = ()) -> _Probe:
    def rendered(
        messages: Sequence[Message], _tools: object, *, where: str = "", generation_prompt: bool = False
    ) -> SimpleNamespace:
        del where
        return SimpleNamespace(text=render(messages) + "<assistant>" * generation_prompt, marks=None)

    template: Any = SimpleNamespace(render=rendered, special_tokens={}, name="the template")
    return _Probe(Conversation(messages, where="a.jsonl:3"), template, special)


USER: Message = {"role": "user", "content": "ask"}
REPLY: Message = {"role": "assistant", "content": "say  so"}
UNKNOWN = (
    "a.jsonl:3: cannot locate the reply of message {} in the text that the template renders: {}; use a template with"
)


def refused(index: int, why: str) -> Any:
    return pytest.raises(DataError, match="^" + UNKNOWN.format(index, why))


def test_a_reply_begins_after_the_generation_prompt_and_ends_with_its_turn() -> None:
    found = probe(turns, USER, REPLY, USER, REPLY)
    assert (found.begin_of(1), found.end_of(1, 20)) == (len("<user>ask<assistant>"), len("<user>ask<assistant>say  so"))
    assert found.end_before(1) == len("<user>ask")
    assert found.text[found.begin_of(3) :] == "say  so"


def test_where_renderings_are_no_beginnings_a_marker_finds_the_places() -> None:
    found = probe(numbered, USER, REPLY, USER, REPLY)
    assert (found.begin_of(1), found.end_of(1, 22)) == (
        len("4:<user>ask<assistant>"),
        len("4:<user>ask<assistant>say  so"),
    )
    assert found.end_before(1) == len("4:<user>ask")


def test_a_template_that_changes_a_marker_lets_no_place_be_found() -> None:
    found = probe(lambda messages: numbered(messages).upper(), USER, REPLY, USER, REPLY)
    with refused(1, "the template renders the messages before the reply differently without the reply"):
        found.begin_of(1)
    with refused(1, "the template renders the reply differently if further messages follow"):
        found.end_of(1, 9)
    with refused(2, "the template renders the messages up to this one differently if further messages follow"):
        found.end_before(3)


def test_a_content_begins_before_its_first_letter_or_where_it_would_begin() -> None:
    silent: Message = {"role": "assistant", "content": ""}
    for render, number in ((turns, ""), (numbered, "4:")):
        found = probe(render, USER, REPLY, silent, USER)
        assert found._place_of_content(0) == len(f"{number}<user>")
        assert found._place_of_content(1) == len(f"{number}<user>ask<assistant>")
        assert found._place_of_content(2) == len(f"{number}<user>ask<assistant>say  so<assistant>")
        assert found._place_of_content(3) == len(f"{number}<user>ask<assistant>say  so<assistant><user>")

    def measured(messages: Sequence[Message]) -> str:
        return f"{len(turns(messages))}:{turns(messages)}"

    def without(messages: Sequence[Message]) -> str:
        return turns([message for message in messages if message["role"] == "user"])

    for render in (measured, without):  # what comes before changes, or the content is left out
        assert probe(render, USER, silent, USER)._place_of_content(1) is None


def test_a_template_that_refuses_the_messages_up_to_a_reply_cannot_end_it() -> None:
    def whole(messages: Sequence[Message]) -> str:
        if len(messages) == 2:
            raise DataError("an odd number of messages")
        return turns(messages)

    with refused(1, "the template does not render the messages up to the reply alone"):
        probe(whole, USER, REPLY, USER).end_of(1, 9)


def test_a_reply_holds_its_content_or_its_marker_and_the_names_of_its_calls() -> None:
    found = probe(contents_last, USER, REPLY)
    assert found.text == "<user><assistant>ask|say  so"
    found.check_reply(1, 17, 28)
    with refused(1, "the template renders content of this reply outside of the reply"):
        found.check_reply(1, 6, 17)
    # A template that changes white space in a content is confirmed by the marker after it.
    spaces = probe(lambda messages: " ".join(contents_last(messages).split()), USER, REPLY)
    end = len("<user><assistant>ask|say so")
    spaces.check_reply(1, 17, end)
    spaces.check_reply(1, end, end)
    for begin, last in ((6, end - 1), (end + 1, end + 2)):
        with refused(1, "the template renders content of this reply outside of the reply"):
            spaces.check_reply(1, begin, last)
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    with refused(1, "the template renders tool calls of this reply outside of the reply"):
        probe(turns, USER, calls).check_reply(1, 9, 20)


def test_a_common_beginning_has_no_part_of_a_special_token() -> None:
    found = probe(turns, USER, REPLY, special=["<<a>", "<b>"])
    assert found._common("abcd", "abxy") == 2
    assert found._common("x<b>y", "x<b>z") == 4
    assert found._common("x<b>", "x<c>") == 1
    assert found._common("x<<a>", "x<<b>") == found._common("x<<b>", "x<<a>") == 1


@pytest.mark.parametrize(
    ("text", "special", "end"),
    [
        ("ab</s> \n<u>", ["</s>", "<u>"], len("ab</s>")),
        ("ab \n<u>c", ["</s>", "<u>"], len("ab \n<u>")),  # the token that opens the next message
        ("ab \nc", ["</s>"], len("ab \n")),
    ],
)
def test_a_reply_stops_with_its_token_or_with_the_one_of_the_next_message(
    text: str, special: list[str], end: int
) -> None:
    found = probe(lambda _messages: text, USER, REPLY, special=special)
    assert found.stop_of(0, text.index("\n") + 1) == end


def test_a_marker_occurs_nowhere_in_a_conversation() -> None:
    said: Message = {"role": "assistant", "content": "zq0probe and zq1probe"}
    assert probe(turns, USER, REPLY).word == "zq0probe"
    assert probe(turns, USER, said).word == "zq2probe"
