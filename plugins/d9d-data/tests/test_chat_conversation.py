"""Records of conversations: fields, and texts of errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.chat.conversation import call_names, text_of
from d9d_data.chat.formats import read_conversation

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def test_messages_are_kept_with_their_other_keys_and_without_nulls() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "weight": 1}
    read = read_conversation({"messages": [HELLO[0], message], "id": 3}, "x")
    assert read.messages[1] == {key: value for key, value in message.items() if key != "content"}
    assert (read.replies, read.tools, read.prompt) == ((1,), None, 0)
    assert call_names(read.messages[1]) == ["look"]


def test_prompt_and_completion_are_texts_or_messages() -> None:
    texts = read_conversation({"prompt": "Hi", "completion": "Hello!"}, "x")
    lists = read_conversation({"prompt": HELLO[:1], "completion": HELLO[1:]}, "x")
    assert texts == lists
    assert (texts.prompt, texts.messages) == (1, tuple(HELLO))


def test_replies_of_a_prompt_do_not_count() -> None:
    read = read_conversation({"prompt": [*HELLO, HELLO[0]], "completion": "Bye."}, "x")
    assert (read.replies, read.last_turn) == ((3,), 3)


@pytest.mark.parametrize(
    ("roles", "last_turn"), [("ua", 1), ("uaua", 3), ("uatau", 1), ("suatatsa", 2), ("a", 0), ("aua", 2), ("uaau", 1)]
)
def test_the_last_turn_begins_after_the_last_user_message_with_a_reply(roles: str, last_turn: int) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": "text"} for role in roles]
    assert read_conversation({"messages": messages}, "x").last_turn == last_turn


@pytest.mark.parametrize("tools", [[CALL], json.dumps([CALL]), (CALL,)])
def test_tools_are_a_list_or_json_of_one(tools: Any) -> None:
    assert read_conversation({"messages": HELLO, "tools": tools}, "x").tools == (CALL,)


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools_are_none(tools: Any) -> None:
    assert read_conversation({"messages": HELLO, "tools": tools}, "x").tools is None


def test_parts_are_joined_to_a_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of({"role": "user", "content": parts}) == "ab"
    assert text_of({"role": "assistant"}) == ""


def one(**message: Any) -> dict[str, Any]:
    return {"messages": [message, *HELLO]}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("text", "t:1 is a string, not an object; write one such as"),
        (None, "t:1 is null, not an object"),
        (
            {"text": "a", "id": 1},
            r"fields of no known format \(it has text, id\); .* 'format: {user:",
        ),
        ({"messages": None}, r"\(it has none\)"),
        ({"prompt": "a"}, r"\(it has prompt\)"),
        ({"messages": "Hi"}, "t:1: messages is a string, not a list"),
        ({"messages": "[Hi"}, "t:1: messages is a string that is not JSON"),
        ({"messages": {"role": "user"}}, "messages is an object, not a list"),
        ({"messages": []}, "messages is empty; leave the record out"),
        ({"messages": HELLO[:1]}, "messages has no assistant message, so there is nothing to train on"),
        ({"prompt": HELLO, "completion": HELLO[:1]}, "completion has no assistant message"),
        ({"prompt": "a", "completion": 3}, "completion is a number, not a list"),
        ({"messages": ["Hi"]}, r"messages\[0\] is a string, not an object"),
        (one(content="a"), r"messages\[0\] has no field 'role' \(it has content\); use one of system, developer"),
        (one(role="asistant", content="a"), "unknown role 'asistant'; did you mean 'assistant'?"),
        (one(role="gpt", content="a"), "unknown role 'gpt'; use one of system"),
        (one(role=["user"], content="a"), "unknown role"),
        (one(role="user", content=" "), r"messages\[0\] of the user has empty content; fill it"),
        (one(role="assistant", content=""), "has empty content and neither tool calls nor reasoning"),
        (one(role="assistant"), "has empty content and neither"),
        (one(role="tool", name="a"), r"of role 'tool' has no field 'content' \(it has role, name\)"),
        (one(role="user", content=3), r"messages\[0\].content is a number; give a string, or a list"),
        (one(role="user", content=[{"type": "image", "url": "x"}]), r"content\[0\] is not text \(image\); only parts"),
        (one(role="user", content=["x"]), r"content\[0\] is not text \(a string\)"),
        (one(role="user", content=[{"type": "text"}]), r"content\[0\] is not text"),
        (one(role="assistant", tool_calls={}), "tool_calls is an object, not a list"),
        (one(role="assistant", tool_calls=[{"function": {}}]), r"tool_calls\[0\] names no function; write"),
        (one(role="assistant", tool_calls=["look"]), r"tool_calls\[0\] names no function"),
        (one(role="user", content="a", tool_calls=[CALL]), "of role 'user' has tool calls; only the assistant"),
        (one(role="assistant", content="a", reasoning_content=3), "reasoning_content is a number; give a string"),
        ({"messages": HELLO, "tools": "[{"}, "t:1: tools is a string that is not JSON"),
        ({"messages": HELLO, "tools": "[" * 10**5}, "not JSON"),
        ({"messages": HELLO, "tools": {"name": "a"}}, "tools is an object, not a list"),
        ({"messages": HELLO, "tools": ["look"]}, r"tools\[0\] is a string, not an object"),
    ],
)
def test_what_is_no_conversation_is_an_error(record: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        read_conversation(record, "t:1")
    assert str(caught.value).startswith("t:1")


def test_an_empty_system_message_or_result_is_fine() -> None:
    messages = [{"role": "system", "content": ""}, HELLO[0], {"role": "tool", "content": ""}, HELLO[1]]
    assert len(read_conversation({"messages": messages}, "x").messages) == 4
