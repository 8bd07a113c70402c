"""Rendering, tokens and marks, equal to the results of transformers, for published templates and for our own."""

from __future__ import annotations

import importlib.resources
import json
import re
from datetime import datetime
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
from d9d_data.chat.mask import find_replies
from d9d_data.chat.template import ChatTemplate
from tokenizers import decoders, models, pre_tokenizers

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

OWN = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
PUBLISHED = {
    item.name: item.read_text(encoding="utf-8")
    for item in sorted((importlib.resources.files(trl) / "chat_templates").iterdir(), key=lambda item: item.name)
    if item.name.endswith(".jinja")
}
TEMPLATES = OWN | PUBLISHED
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOKEN = re.compile(r"<[|\uff5c][^<>|\uff5c\n']+[|\uff5c]>|<\w+_of_\w+>|<turn\|>")
ADDED = sorted({*TOKENS.values(), *TOKEN.findall("".join(TEMPLATES.values()))})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather, <b>&'\" of a città",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "é"}},
            "required": ["city"],
        },
    },
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "sunny"}
RECORDS: dict[str, dict[str, Any]] = {
    "turns": {"messages": [user("Hi there"), assistant("Hello!"), user("And?"), assistant("Bye.")]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, user(" Hi\n"), assistant("  Hello!\n")]},
    "tools": {
        "tools": [WEATHER],
        "messages": [
            user("Weather?"),
            assistant("", tool_calls=[call("get_weather", city="Köln")]),
            RESULT,
            assistant("It is sunny."),
            user("Thanks"),
            assistant("Sure."),
        ],
    },
    "reasoning": {
        "messages": [
            user("One?"),
            assistant("First.", reasoning_content="hm"),
            user("Two?"),
            assistant("Second.", reasoning_content="hm hm"),
        ]
    },
    "parts": {
        "messages": [
            user([{"type": "text", "text": "Hi"}]),
            assistant([{"type": "text", "text": "Hello!"}]),
            user([{"type": "text", "text": "And?"}]),
        ]
    },
}


@cache
def backend() -> tokenizers.Tokenizer:
    """Tokenizer of bytes, with the special tokens of all templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(ADDED)
    return made


@cache
def reference() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend(), **TOKENS)


def of_transformers(text: str, conversation: Conversation, **options: Any) -> Any:
    tools = None if conversation.tools is None else list(conversation.tools)
    messages = [dict(message) for message in conversation.messages]
    return reference().apply_chat_template(messages, tools, chat_template=text, **options)


def conversations() -> list[Conversation]:
    return [read_conversation(record, name) for name, record in RECORDS.items()]


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], TOKENS, name=name)


def test_templates_of_many_families_are_compared() -> None:
    assert len(OWN) >= 10
    assert len(PUBLISHED) >= 10


@pytest.mark.full
@pytest.mark.parametrize("name", TEMPLATES)
def test_renderings_equal_those_of_transformers(name: str) -> None:
    made, rendered = template(name), 0
    for conversation in conversations():
        for prompt in (False, True):
            try:
                expected = of_transformers(
                    made.texts["default"], conversation, tokenize=False, add_generation_prompt=prompt
                )
            except Exception:
                with pytest.raises(DataError, match=f"{conversation.where}: {name} cannot render"):
                    made.render(
                        conversation.messages, conversation.tools, generation_prompt=prompt, where=conversation.where
                    )
            else:
                got = made.render(conversation.messages, conversation.tools, generation_prompt=prompt)
                assert got.text == expected
                rendered += 1
    assert rendered >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_marks_equal_those_of_transformers(name: str) -> None:
    made, tokenizer, encoded = template(name), ChatTokenizer(backend().to_str()), 0
    for conversation in conversations():
        try:
            ids, weights = encode(conversation, made, tokenizer)
        except DataError:
            continue
        marked = made.marked(conversation.tools)
        expected = of_transformers(
            made.texts["default"], conversation, return_dict=True, return_assistant_tokens_mask=marked
        )
        assert ids.tolist() == expected["input_ids"]
        assert ids.dtype == np.int64
        assert weights.dtype == np.bool_
        if marked:
            assert weights.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
        encoded += 1
    assert encoded


#: Text inside the marks of published training templates that the model does not write after the prompt.
HEADERS = re.compile(r"^(<\uff5cAssistant\uff5c>|<\|start\|>assistant)?(<think>(\n|(\n\n)?</think>(\n\n)?)?)?")
PAIRS = [name for name in PUBLISHED if f"{name.removesuffix('.jinja')}_training.jinja" in PUBLISHED]


@pytest.mark.thorough
@pytest.mark.parametrize("name", PAIRS)
def test_replies_found_without_marks_are_those_of_the_marked_template(name: str) -> None:
    plain, marked = template(name), template(f"{name.removesuffix('.jinja')}_training.jinja")
    for conversation in conversations():
        try:
            text, spans = find_replies(conversation, plain, ADDED, 0)
            other, marks = find_replies(conversation, marked, ADDED, 0)
        except DataError:
            continue
        if text != other:
            continue
        weight, mark = np.zeros((2, len(text)), dtype=bool)
        for begin, end in spans:
            weight[begin:end] = True
        for begin, end in marks:
            mark[begin:end] = True
        for begin, end in spans:
            inside = "".join(text[i] for i in range(begin, end) if not mark[i])
            assert inside.strip() in ("", "<|turn>model", "<tool_response>", "<|tool_response>"), (
                "weight where there is no mark"
            )
        missed = re.split("\0+", "".join(text[i] if mark[i] and not weight[i] else "\0" for i in range(len(text))))
        for part in filter(str.strip, missed):
            assert HEADERS.fullmatch(part.strip()), "a mark without weight"


def test_the_template_of_a_directory_is_read(tmp_path: Path) -> None:
    messages = [user("a")]
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": None,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(messages).text == "<s>a"
    assert ChatTemplate.load(tmp_path / "tokenizer.json").render(messages).text == "<s>a"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert ChatTemplate.load(tmp_path).render(messages).text == "<s>!"


def test_a_template_for_tools_is_chosen_by_its_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{% generation %}t{% endgeneration %}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    made = ChatTemplate.load(tmp_path)
    assert (made.render([user("a")]).text, made.render([user("a")], [WEATHER]).text) == ("plain", "t")
    assert (made.marked(None), made.marked([WEATHER])) == (False, True)


@pytest.mark.parametrize(
    "config", [{}, {"chat_template": None}, {"chat_template": 3}, {"chat_template": [{"name": "a"}]}]
)
def test_a_directory_without_template_is_an_error(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="chat_template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("value", [3, {}, ["a"], [{"name": "a"}], [{"name": "a", "template": "b"}, "c"]])
def test_a_template_that_is_neither_a_text_nor_named_texts_is_to_be_repaired(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(DataError) as error:
        ChatTemplate.load(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    assert str(error.value) == f"{file}: chat_template is neither a text nor a list of named texts; repair it"


def test_a_directory_without_any_template_is_told_what_to_write(tmp_path: Path) -> None:
    for content in ("{}", '{"chat_template": null}', '{"chat_template": []}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        if "[]" in content:
            with pytest.raises(DataError, match="chat_template is neither a text nor a list"):
                ChatTemplate.load(tmp_path)
            continue
        with pytest.raises(DataError) as error:
            ChatTemplate.load(tmp_path)
        assert str(error.value) == (
            f"{tmp_path} has no chat template: neither a chat_template.jinja nor a field 'chat_template' in "
            "tokenizer_config.json; use the tokenizer files of a model trained for conversations, or write that file"
        )


def test_a_template_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(DataError, match=r"chat_template.jinja is not UTF-8 text \(byte 1"):
        ChatTemplate.load(tmp_path)


@pytest.mark.thorough
def test_directories_that_transformers_writes_are_read(tmp_path: Path) -> None:
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend(), chat_template=TEMPLATES["llama2.jinja"], **TOKENS
    )
    saved.save_pretrained(tmp_path)
    for conversation in conversations()[:2]:
        messages = [dict(message) for message in conversation.messages]
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, return_dict=True)
        tokenizer = ChatTokenizer((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        ids, _ = encode(conversation, ChatTemplate.load(tmp_path), tokenizer)
        assert ids.tolist() == expected["input_ids"]


def test_templates_without_a_default_are_an_error() -> None:
    with pytest.raises(DataError, match=r"no template named 'default' \(it has rag\)"):
        ChatTemplate({"rag": "x"}).render([user("a")])


def test_a_malformed_template_names_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("fine\n{% for x in %}")
    with pytest.raises(DataError, match=r"chat_template.jinja:2: the chat template is malformed: Expected"):
        ChatTemplate.load(tmp_path)


def test_a_refusal_is_quoted_with_the_record() -> None:
    made = ChatTemplate("{{ raise_exception('no system role') }}", name="t.jinja")
    with pytest.raises(DataError, match="a.jsonl:3: t.jinja cannot render the conversation: no system role"):
        made.render([user("a")], where="a.jsonl:3")


def test_templates_that_ask_for_the_date_are_told_apart() -> None:
    text = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    assert ChatTemplate(text).depends_on_date
    assert not ChatTemplate("{# strftime_now #}{% set strftime_now = 1 %}{{ 'strftime_now' }}").depends_on_date
    fixed = ChatTemplate(text, now=datetime(2024, 7, 26))
    assert not fixed.depends_on_date
    assert fixed.render([user("a")]).text == "26 Jul 2024"


def test_arguments_reach_the_template_and_its_identity() -> None:
    text = "{{ enable_thinking }}"
    made = ChatTemplate(text, arguments={"enable_thinking": False})
    assert made.render([user("a")]).text == "False"
    assert made.identity == ChatTemplate(text, arguments={"enable_thinking": False}).identity
    assert made.identity != ChatTemplate(text).identity
    one, other = (ChatTemplate(text, arguments=dict(pairs)) for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)]))
    assert one.identity == other.identity


def test_a_block_whose_place_cannot_be_told_is_an_error() -> None:
    made = ChatTemplate("{% set x %}a{% generation %}b{% endgeneration %}{% endset %}-{{ x }}")
    with pytest.raises(DataError, match="generation block inside a macro, a set"):
        made.render([user("a")])
