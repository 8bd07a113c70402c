"""Weights of conversations: the assistant's text up to the token that ends its turn, and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from d9d_core.errors import DataError
from d9d_data.chat.conversation import Conversation
from d9d_data.chat.encode import ChatTokenizer, encode
from d9d_data.chat.formats import read_conversation
from d9d_data.chat.template import ChatTemplate
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

FOLDER = Path(__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]
#: What each template puts around a content in a reply: in the last turn, and in others if that differs.
AROUND: dict[str, tuple[tuple[str, str], ...]] = {
    "alpaca": (("", "</s>"),),
    "chatml": (("", "<|im_end|>"),),
    "gemma_turns": (("", "<end_of_turn>"),),
    "harmony": (("<|channel|>final<|message|>", "<|return|>"), ("<|channel|>final<|message|>", "<|end|>")),
    "hermes_tools": (("", "<|im_end|>"),),
    "llama2": ((" ", " </s>"),),
    "llama3_headers": (("", "<|eot_id|>"),),
    "mistral_calls": (("", "</s>"),),
    "phi_end": (("", "<|end|>\n</s>"), ("", "<|end|>")),
    "thinking_last": (("\n</think>\n\n", "<|im_end|>"), ("", "<|im_end|>")),
    "vicuna": ((" ", "</s>"),),
    "zephyr": (("", "</s>"),),
}


@cache
def backend() -> tokenizers.Tokenizer:
    """Tokenizer of bytes, so that every character can begin a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(ADDED)
    return made


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS, name=name)


@cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(backend().to_str())


def weighted(ids: Any, weights: Any) -> list[str]:
    """Texts of the runs of tokens that have weight."""
    edges = np.flatnonzero(np.diff([False, *weights, False]))
    return [backend().decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


def texts_of(name: str, conversation: Conversation, **options: Any) -> list[str]:
    return weighted(*encode(conversation, template(name), tokenizer(), **options))


def conversation(*texts: str, system: str | None = None) -> Conversation:
    """Conversation of turns that alternate."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    head = [] if system is None else [{"role": "system", "content": system}]
    return read_conversation({"messages": head + messages}, "t:1")


def test_every_template_is_here() -> None:
    assert sorted(AROUND) == sorted(path.stem for path in FOLDER.glob("*.jinja"))


#: Texts that templates do not strip, with tokens and markup of templates in them.
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp", "Co", "Cn"]), min_size=1, max_size=6)
TRICKY = st.sampled_from(
    [*ADDED, "assistant", "ASSISTANT:", "USER: ", "### Response:", "model", "{{ x }}", "zq0probe", "é漢😀"]
)
TEXT = st.lists(PLAIN | TRICKY, min_size=1, max_size=4).map(" ".join).filter(lambda text: text == text.strip())
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", AROUND)
@given(turns=TURNS, system=st.none() | TEXT)
@settings(max_examples=25)
def test_weight_has_what_the_assistant_says_and_the_end_of_its_turn(
    name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    made = conversation(*(text for turn in turns for text in turn), system=system)
    last, other = AROUND[name][0], AROUND[name][-1]
    replies = [reply for _, reply in turns]
    around = [*([other] * (len(turns) - 1)), last]
    expected = [before + reply + after for reply, (before, after) in zip(replies, around, strict=True)]
    assert texts_of(name, made) == expected
    assert texts_of(name, made, loss="last_turn") == expected[-1:]
    ids, weights = encode(made, template(name), tokenizer(), "all")
    assert weights.all()
    assert backend().decode(ids.tolist(), skip_special_tokens=False) == template(name).render(made.messages).text


@pytest.mark.thorough
@pytest.mark.parametrize("name", AROUND)
@given(turns=TURNS, changed=st.data())
@settings(max_examples=15)
def test_what_users_say_does_not_change_what_has_weight(
    name: str, turns: list[tuple[str, str]], changed: st.DataObject
) -> None:
    others = [(changed.draw(TEXT), reply) for _, reply in turns]
    one, two = (conversation(*(text for turn in version for text in turn)) for version in (turns, others))
    assert texts_of(name, one) == texts_of(name, two)


def test_a_reply_may_be_the_user_s_text_and_the_text_of_a_special_token() -> None:
    assert texts_of("hermes_tools", conversation("0", "0 <s>")) == texts_of("hermes_tools", conversation("1", "0 <s>"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", AROUND)
@given(before=TURNS, after=TURNS)
@settings(max_examples=15)
def test_a_completion_has_the_weight_of_its_turns(
    name: str, before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    texts = [text for turn in [*before, *after] for text in turn]
    whole = conversation(*texts)
    cut = 2 * len(before) + 1
    made = read_conversation({"prompt": whole.messages[:cut], "completion": whole.messages[cut:]}, "t:1")
    assert texts_of(name, made) == texts_of(name, whole)[len(before) :]


def test_white_space_around_contents_belongs_to_them_unless_the_template_strips_it() -> None:
    made = conversation(" Hi ", "\n one \n", "And?", " two ")
    assert texts_of("chatml", made) == ["\n one \n<|im_end|>", " two <|im_end|>"]
    assert texts_of("gemma_turns", made) == ["one<end_of_turn>", "two<end_of_turn>"]


def test_reasoning_belongs_to_the_reply_that_shows_it() -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First.", "reasoning_content": "hm"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second.", "reasoning": "hm hm"},
    ]
    made = read_conversation({"messages": messages}, "t:1")
    assert texts_of("thinking_last", made) == ["First.<|im_end|>", "hm hm\n</think>\n\nSecond.<|im_end|>"]


CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "Köln"}}}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistral_calls", '[TOOL_CALLS][{"name": "look", "arguments": {"at": "Köln"}}]</s>'),
        ("hermes_tools", '\n<tool_call>{"name": "look", "arguments": {"at": "Köln"}}</tool_call><|im_end|>'),
    ],
)
def test_tool_calls_have_weight_and_results_do_not(name: str, expected: str) -> None:
    made = read_conversation({"messages": CALLS}, "t:1")
    end = "</s>" if name == "mistral_calls" else "<|im_end|>"
    assert texts_of(name, made) == texts_of(name, made, loss="last_turn") == [expected, f"It is sunny.{end}"]


def test_replies_in_a_row_are_told_apart() -> None:
    messages = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    ]
    assert texts_of("chatml", read_conversation({"messages": messages}, "t:1")) == ["b<|im_end|>", "c<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant_and_end_with_the_user() -> None:
    messages = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("user", "b"))]
    assert texts_of("chatml", read_conversation({"messages": messages}, "t:1")) == ["a<|im_end|>"]


def test_names_of_roles_have_no_weight_though_a_template_has_no_generation_prompt() -> None:
    text = "{% for m in messages %}{{ messages | length }} {{ m.role }}: {{ m.content }}|{% endfor %}"
    ids, weights = encode(conversation("a", "b", "c", "d"), ChatTemplate(text, TOKENS), tokenizer())
    assert weighted(ids, weights) == ["b|", "d|"]


@pytest.mark.parametrize(
    ("each", "says"),
    [
        ("{{ m.content if m.role != 'system' }}", r"leaves out the content of message 0 \(system\)"),
        ("{{ m.content if m.role != 'tool' }}{{ m.tool_calls }}", r"leaves out the content of message 3 \(tool\)"),
        ("{{ m.content }}", "leaves out tool call 0 of message 2"),
        ("{{ messages }}", "cannot locate the reply of message 2"),
        ("{{ messages[-loop.index] }}", "cannot locate the reply of message 4"),
    ],
)
def test_a_template_whose_replies_cannot_be_told_is_an_error(each: str, says: str) -> None:
    made = read_conversation({"messages": [{"role": "system", "content": "S."}, *CALLS]}, "t:1")
    text = "{% for m in messages %}" + each + "|{% endfor %}"
    with pytest.raises(DataError, match=f"t:1: .*{says}"):
        encode(made, ChatTemplate(text, TOKENS, name="t.jinja"), tokenizer())


def test_tools_that_a_template_leaves_out_are_an_error() -> None:
    made = read_conversation({"messages": CALLS[:1] + CALLS[3:], "tools": [{"function": {"name": "look"}}]}, "t:1")
    with pytest.raises(DataError, match="t:1: chatml leaves out the tools"):
        encode(made, template("chatml"), tokenizer(), "all")


def test_every_part_of_a_content_has_to_be_rendered() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = read_conversation({"messages": [{"role": "user", "content": parts}, CALLS[3]]}, "t:1")
    text = "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}|{% endfor %}"
    with pytest.raises(DataError, match=r"leaves out the content of message 0"):
        encode(made, ChatTemplate(text), tokenizer())
    ids, weights = encode(
        made, ChatTemplate(text.replace("m.content[-1].text", "m.content | map(attribute='text') | join")), tokenizer()
    )
    assert weighted(ids, weights) == ["It is sunny.|"]


def test_what_is_left_out_is_seen_though_a_template_checks_its_input() -> None:
    text = "{% for m in messages %}{% if 'probe' in m.content %}{{ raise_exception('no') }}{% endif %}"
    text += "{{ m.content if m.role == 'assistant' }}|{% endfor %}"
    with pytest.raises(DataError, match=r"leaves out the content of message 0"):
        encode(conversation("a", "b"), ChatTemplate(text), tokenizer())


def test_parts_that_a_template_would_quote_are_an_error() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        DataError, match=r"renders the list of parts in the content of message 0 \(user\) as a Python list"
    ):
        encode(read_conversation({"messages": messages}, "t:1"), template("llama3_headers"), tokenizer())
