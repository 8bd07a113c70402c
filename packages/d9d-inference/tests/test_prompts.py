"""Prompts and tools of ``d9d generate``, read from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from d9d_core.errors import DataError
from d9d_inference.generation.prompts import Prompt, read_prompts, read_tools


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "a line must hold a JSON object, not an empty one"),
        ("[1]", "a line must hold a JSON object, not a list"),
        ('"x"', "not a text"),
        ("3", "not a number"),
        ("true", "not true or false"),
        ("null", "not null"),
        ("{", ""),
        ('{"prompt": "a", "tokens": 1}', "'tokens' is a field of the output; rename it"),
        ("{}", "a line needs either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "a line needs either 'prompt' or 'messages'"),
        ('{"prompt": ""}', "'prompt' must be a non-empty text, not an empty one"),
        ('{"prompt": {"a": 1}}', "'prompt' must be a non-empty text, not an object"),
        ('{"messages": []}', "'messages' must be a non-empty list, not an empty one"),
        ('{"messages": "a"}', "'messages' must be a non-empty list, not a text"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": 1}]}', "messages[1] must be an object"),
        ('{"messages": [3]}', "messages[0] must be an object"),
        ('{"messages": [{"role": "user"}]}', "messages[0] has no 'content'"),
        ('{"prompt": "a", "tools": [1]}', "'tools': must be a list of tool schemas, each an object, not a list"),
        ('{"prompt": "a", "tools": []}', "'tools': must be a list of tool schemas"),
    ],
)
def test_a_malformed_prompt_is_named_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert problem in str(error.value)


def test_prompts_have_their_lines_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}]
    path.write_text(f'{{"prompt": "good", "id": 3}}\n \n{json.dumps({"messages": messages, "tools": [{}]})}\n')
    first, second = read_prompts(path)
    assert first == Prompt(f"{path}:1", {"prompt": "good", "id": 3}, "good", (), None)
    assert (second.where, second.text, second.messages, second.tools) == (f"{path}:3", None, messages, [{}])
    path.write_text("\n")
    with pytest.raises(DataError, match="has no prompt"):
        read_prompts(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_prompts(path)


@pytest.mark.parametrize(("count", "more"), [(10, []), (12, ["and 2 more lines"])])
def test_at_most_ten_malformed_lines_are_listed(tmp_path: Path, count: int, more: list[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n" * count)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value).splitlines()[10:] == more


def test_tools_are_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    for text, said in (("{", "is not JSON"), ("{}", "not an empty one"), ("[[]]", "not a list")):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_tools(path)
    path.write_text('[{"type": "function"}]')
    assert read_tools(path) == [{"type": "function"}]
    with pytest.raises(DataError, match="cannot be read"):
        read_tools(tmp_path / "none")
