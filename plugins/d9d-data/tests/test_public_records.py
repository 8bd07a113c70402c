"""Ten forms of public records: the rendered text and the learned tokens equal texts written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_data.config import ChatConfig, TokensConfig
from d9d_data.stream.chat import build_chat, build_tokens
from tokenizers import Tokenizer

#: ChatML with generation blocks, tools and calls.
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% elif m.content is string %}{{ m.content }}<|im_end|>\n"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Brackets without generation blocks.
BRACKETS = (
    "{% if tools %}[tools] {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endif %}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"name": "add", "arguments": {"a": 1}}
TOOLS, CALLED = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]', '<call>add {"a": 1}'
Turns = list[tuple[str, str]]
#: Form -> record, fields of the config, and the turns of the rendering.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], Turns]] = {
    "messages with tools": (
        {
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "",
                 "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "Two."},
            ],
        },
        {},
        [("tools", TOOLS), ("user", "1 + 1?"), ("assistant", CALLED), ("tool", "2"), ("assistant", "Two.")],
    ),
    "messages with parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
                {"role": "assistant", "content": "Hello!"},
            ]
        },
        {},
        [("user", "Hi there"), ("assistant", "Hello!")],
    ),
    "ShareGPT": (
        {
            "id": "x_1",
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello!"},
                {"from": "human", "value": "Bye"},
                {"from": "gpt", "value": "Farewell."},
            ],
        },
        {},
        [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "Farewell.")],
    ),
    "ShareGPT with calls": (
        {
            "system": "Add.",
            "tools": json.dumps([TOOL]),
            "conversations": [
                {"from": "human", "value": "1 + 1?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "Two."},
            ],
        },
        {},
        [("tools", TOOLS), ("system", "Add."), ("user", "1 + 1?"), ("assistant", CALLED), ("tool", "2"),
         ("assistant", "Two.")],
    ),
    "Alpaca with input": (
        {"instruction": "Add the numbers.", "input": "1, 1", "output": "2", "text": "unused"},
        {},
        [("user", "Add the numbers.\n1, 1"), ("assistant", "2")],
    ),
    "Alpaca without input": (
        {"instruction": "Name a fox.", "input": "", "output": "Reineke"},
        {},
        [("user", "Name a fox."), ("assistant", "Reineke")],
    ),
    "Dolly": (
        {"instruction": "Who?", "context": "A fox came.", "response": "The fox.", "category": "closed_qa"},
        {},
        [("user", "Who?\nA fox came."), ("assistant", "The fox.")],
    ),
    "prompt and completion": (
        {"prompt": "Hi", "completion": "Hello!"},
        {},
        [("user", "Hi"), ("assistant", "Hello!")],
    ),
    "question and answer": (
        {"question": "2 * 3?", "answer": "6"},
        {},
        [("user", "2 * 3?"), ("assistant", "6")],
    ),
    "named fields": (
        {"data": {"dialogue": [{"speaker": "customer", "text": "Hi"}, {"speaker": "agent", "text": "Hello!"}]}},
        {"format": {"messages": "data.dialogue", "role": "speaker", "content": "text",
                    "roles": {"customer": "user", "agent": "assistant"}}},
        [("user", "Hi"), ("assistant", "Hello!")],
    ),
}  # fmt: skip


def shown(kind: str, turns: Turns) -> tuple[str, str]:
    """Rendering of turns, and the learned text."""
    if kind == "chatml":
        whole = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    else:
        whole = "".join(f"[{role}] {text}<|im_end|>" for role, text in turns)
    return whole, "".join(f"{text}<|im_end|>" for role, text in turns if role == "assistant")


@pytest.fixture(params=["chatml", "brackets"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(model: Path, tmp_path: Path, kind: str) -> Path:
    """The tokenizer of the model with one of the templates."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML if kind == "chatml" else BRACKETS)
    return tmp_path / "model"


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_public_records_learn_the_tokens_of_the_assistant(
    directory: Path, tmp_path: Path, kind: str, form: str
) -> None:
    record, fields, turns = FORMS[form]
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    config = ChatConfig.model_validate({"sources": [str(tmp_path / "data.jsonl")], "sequence_length": 512, **fields})
    context = DataContext(0, 1, 1, tmp_path / "cache", pretrained=str(directory))
    (batch,) = build_chat(config, context).next_pack()
    whole, learned = shown(kind, turns)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(whole, add_special_tokens=False).ids
    length = int(batch["lengths"])
    assert batch["tokens"][0, :length].tolist() == ids[:-1]
    targets = batch["targets"][0, :length].tolist()
    assert all(target in (-100, token) for target, token in zip(targets, ids[1:], strict=True))
    assert tokenizer.decode([target for target in targets if target >= 0], skip_special_tokens=False) == learned


def test_rows_with_labels_learn_the_tokens_of_the_labels(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked, said = (tokenizer.encode(text).ids for text in ("<|im_start|>user\nHi<|im_end|>\n", "Hello!<|im_end|>"))
    record = {
        "input_ids": asked + said,
        "attention_mask": [1] * len(asked + said),
        "labels": [-100] * len(asked) + said,
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")
    config = TokensConfig(sources=(str(tmp_path / "rows.jsonl"),), sequence_length=64)
    (batch,) = build_tokens(config, DataContext(0, 1, 1, tmp_path / "cache", pretrained=str(model))).next_pack()
    length = int(batch["lengths"])
    assert batch["tokens"][0, :length].tolist() == (asked + said)[:-1]
    assert batch["targets"][0, :length].tolist() == [-100] * (len(asked) - 1) + said
