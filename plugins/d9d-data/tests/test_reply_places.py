"""Places of replies in renderings of templates that are functions, exactly; and templates that hide them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.chat.complete import check_complete
from d9d_data.chat.conversation import Conversation
from d9d_data.chat.mask import _Probe, find_replies
from d9d_data.chat.template import Rendering

ADDED = ("<e>", "<u>", "<a>", "<x><y>", "<x>", " ")


class Template:
    """Template that is a function of the messages and whether it adds a generation prompt."""

    name = "t.jinja"

    def __init__(self, write: Callable[[Any, bool], str], marks: Any = None, tokens: Any = None) -> None:
        self.write, self.marks, self.special_tokens = write, marks, tokens or {}

    def render(
        self, messages: Any, tools: Any = None, *, generation_prompt: bool = False, where: str = ""
    ) -> Rendering:
        text = self.write(list(messages), generation_prompt)
        return Rendering(text, None if self.marks is None else self.marks(text))


def text_of(message: Any) -> str:
    thought = message.get("reasoning_content")
    return ("" if thought is None else f"({thought})") + message.get("content", "")


def plain(messages: Any, prompt: bool) -> str:
    return "".join(f"<{m['role'][0]}>{text_of(m)}<e>\n" for m in messages) + "<a>" * prompt


def end_last(messages: Any, prompt: bool) -> str:
    """An end after the last message only."""
    return "".join(f"<{m['role'][0]}>{text_of(m)}\n" for m in messages) + ("<a>" if prompt else "<e>")


def own_end(messages: Any, prompt: bool) -> str:
    """Another end after the last reply than after other messages."""
    parts = [f"<{m['role'][0]}>{text_of(m)}" for m in messages]
    ends = ["<e>"] * len(parts)
    if not prompt and messages and messages[-1]["role"] == "assistant":
        ends[-1] = "<x><y>"
    return "".join(map("".join, zip(parts, ends, strict=True))) + "<a>" * prompt


def thoughts_last(messages: Any, prompt: bool) -> str:
    """The reasoning of the last message alone."""
    shown = [{**m, "reasoning_content": None} if m is not messages[-1] else m for m in messages]
    return plain([{k: v for k, v in m.items() if v is not None} for m in shown], prompt)


def no_prompt(messages: Any, _prompt: bool) -> str:
    """No generation prompt, and a header with the number of messages."""
    return "".join(f"{m['role']}: {text_of(m)}<e>" for m in messages)


def numbered(messages: Any, prompt: bool) -> str:
    return f"{len(messages)} " + plain(messages, prompt)


def chat(*texts: str, prompt: int = 0, **last: Any) -> Conversation:
    messages: list[Any] = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    messages[-1] |= last
    return Conversation(tuple(messages), prompt=prompt, where="w")


def replies(write: Any, conversation: Conversation, first: int = 0, marks: Any = None) -> list[str]:
    template: Any = Template(write, marks)
    text, spans = find_replies(conversation, template, ADDED, first)
    assert text == write(list(conversation.messages), False)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (plain, ["b<e>", "d<e>"]), (end_last, ["b\n<u>", "d\n<e>"]), (own_end, ["b<e>", "d<x><y>"]),
        (no_prompt, ["b<e>", "d<e>"]), (numbered, ["b<e>", "d<e>"]), (thoughts_last, ["b<e>", "d<e>"]),
    ],
)  # fmt: skip
def test_replies_end_with_the_token_that_stops_generation(write: Any, found: list[str]) -> None:
    whole = chat("a", "b", "c", "d")
    assert replies(write, whole) == found
    assert replies(write, whole, 2) == replies(write, whole, 3) == found[1:]
    assert replies(write, whole, 4) == []
    assert replies(write, chat("a", "b", "c", "d", prompt=3)) == found[1:]
    assert replies(write, chat("a", "b")) == [found[1].replace("d", "b")]
    # A text of the user that equals a reply, or a token, is none.
    assert replies(write, chat("b", "b", "<e>", "d"))[1:] == found[1:]


def test_reasoning_is_a_part_of_a_reply_that_shows_it() -> None:
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "t"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "reasoning_content": "s"},
    ]  # fmt: skip
    whole = Conversation(tuple(messages), where="w")
    assert replies(thoughts_last, whole) == ["b<e>", "(s)d<e>"]
    assert replies(plain, whole) == ["(t)b<e>", "(s)d<e>"]


def test_marked_blocks_are_the_replies_from_the_first_that_counts() -> None:
    def marks(text: str) -> Any:
        return tuple((place, place + 4) for place in range(len(text)) if text[place : place + 3] in ("b<e", "d<e"))

    whole = chat("a", "b", "c", "d")
    assert replies(plain, whole, 0, marks) == ["b<e>", "d<e>"]
    assert replies(plain, whole, 2, marks) == replies(plain, whole, 3, marks) == ["d<e>"]
    assert replies(plain, whole, 1, marks) == ["b<e>", "d<e>"]
    with pytest.raises(DataError, match=r"^w: t.jinja puts message 0 \(user\) into a generation block, so the model"):
        replies(plain, whole, 0, lambda text: ((text.index("<u>a") + 3, text.index("<e>")),))
    # A block that is also the text of a reply may be that reply's.
    assert replies(plain, chat("b", "b"), 0, lambda text: ((text.rindex("b"), len(text) - 1),)) == ["b<e>"]


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            lambda messages, prompt: plain(messages[::-1], prompt),
            "cannot locate the reply of message [13] in the text that",
        ),
        (lambda messages, prompt: "".join(map(text_of, messages)) if len(messages) == 4 else "", "t.jinja renders: "),
    ],
)
def test_replies_that_cannot_be_located_are_an_error(write: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"^w: .*{says}.*; use a template with {{% generation %}} blocks around the"):
        replies(write, chat("a", "b", "c", "d"))


def test_a_template_that_refuses_parts_of_a_conversation_is_an_error() -> None:
    def whole_only(messages: Any, prompt: bool) -> str:
        if len(messages) < 3 and not prompt:
            raise DataError("too few")
        return numbered(messages, prompt)

    with pytest.raises(DataError, match="message 1 .* the template does not render the messages up to the reply alone"):
        replies(whole_only, chat("a", "b", "c", "d"))


def probe(write: Any, conversation: Conversation, tokens: Any = None) -> Any:
    template: Any = Template(write, tokens=tokens)
    return _Probe(conversation, template, ADDED)


def test_markers_are_words_that_occur_nowhere() -> None:
    assert probe(plain, chat("a", "b")).word == "zq0probe"
    assert probe(plain, chat("zq0probe", "b zq1probe")).word == "zq2probe"
    tools = Conversation(chat("a", "b").messages, ({"name": "zq0probe"},))
    assert probe(plain, tools).word == "zq1probe"


def test_stops_are_the_longest_special_token_at_the_end_or_the_token_that_follows() -> None:
    made = probe(plain, chat("a", "b"))
    for text, begin, end, stop in (
        ("ab<x><y>\n<u>", 0, 9, 8), ("ab<x> ", 0, 6, 5), ("ab\n<u>c", 0, 3, 6), ("ab<u>", 0, 2, 5), ("ab", 0, 2, 2),
        ("<e>ab", 0, 5, 5), ("ab<e>c", 0, 6, 6),
    ):  # fmt: skip
        made.text = text
        assert made.stop_of(begin, end) == stop
    eos = probe(plain, chat("a", "b"), {"eos_token": "</s>", "bos_token": " "})
    eos.text = "ab</s>"
    assert eos.stop_of(0, 6) == 6
    eos.text = "a b"
    assert eos.stop_of(0, 1) == 1  # white space is no token
    assert made._common("ab<x><y>c", "ab<x><y>d") == 8
    assert made._common("ab<x><y>", "ab<x><z>") == 2  # not inside of a token
    assert made._common("ab<x>c", "ab<u>c") == 2
    assert made._common("abc", "abd") == 2
    assert made._common("", "a") == 0


def test_a_reply_holds_its_content_and_the_names_of_its_calls() -> None:
    call = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    whole = Conversation(({"role": "user", "content": "a"}, call), where="w")

    def calls(messages: Any, prompt: bool) -> str:
        names = [f"[{c['function']['name']}]" for m in messages for c in m.get("tool_calls", ())]
        return plain(messages, prompt) + ("".join(names) if not prompt else "")

    made = probe(calls, whole)
    assert made.text == "<u>a<e>\n<a>b<e>\n[look]"
    made.check_reply(1, 11, len(made.text))
    with pytest.raises(DataError, match="message 1 .* the template renders tool calls of this reply outside of the"):
        made.check_reply(1, 11, 15)
    with pytest.raises(DataError, match="message 1 .* the template renders content of this reply outside of the reply"):
        made.check_reply(1, 14, len(made.text))


def test_every_text_of_a_conversation_has_to_be_rendered() -> None:
    messages: Any = (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " "}]},
        {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}, {"name": "g"}]},
        {"role": "tool", "content": ""},
    )
    tools: Any = ({"function": {"name": "f"}}, {"name": "g"}, {"other": 1})

    def check(write: Any) -> None:
        conversation = Conversation(messages, tools, where="w")
        template: Any = SimpleTemplate(write)
        text = template.render(messages, tools).text
        check_complete(conversation, template, text, "zq")

    def names(messages: Any, tools: Any) -> str:
        calls = "".join(call["name"] for m in messages for call in m.get("tool_calls", ()))
        return calls + "".join(tool.get("function", tool).get("name", "") for tool in tools)

    def contents(messages: Any) -> str:
        return "".join(
            m["content"] if isinstance(m["content"], str) else "".join(part["text"] for part in m["content"])
            for m in messages
        )

    check(lambda messages, tools: contents(messages) + names(messages, tools))
    for write, says in (
        (lambda messages, tools: contents(messages[1:]) + names(messages, tools), r"the content of message 0 \(user\)"),
        (lambda messages, tools: contents(messages[:1]) + names(messages, tools), r"the content of message 1 .*"),
        (lambda messages, tools: contents(messages) + names([{"tool_calls": messages[1]["tool_calls"][:1]}], tools),
         "tool call 1 of message 1"),
        (lambda messages, tools: contents(messages) + names(messages, tools[:1]), "the tools"),
        (lambda messages, tools: contents(messages) + names(messages, tools[1:]), "the tools"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^w: t.jinja leaves out {says}; change or leave out the record, or use"):
            check(write)
    with pytest.raises(
        DataError, match=r"^w: t.jinja renders the list of parts in the content of message 0 \(user\) as"
    ):
        check(lambda messages, tools: str(messages[0]["content"]) + contents(messages[1:]) + names(messages, tools))


class SimpleTemplate(Template):
    """Template that is a function of the messages and the tools."""

    def render(self, messages: Any, tools: Any = None, **_: Any) -> Rendering:
        return Rendering(self.write(list(messages), tools), None)
