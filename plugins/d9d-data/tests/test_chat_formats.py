"""Formats of conversations: found by the first record, or named in the job file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.chat.formats import chat_format_of, read_conversation, told
from d9d_data.config import ChatConfig, ChatFormat
from d9d_data.corpus.format import with_format
from d9d_data.corpus.identity import corpus_key
from d9d_data.corpus.worker import Setup
from d9d_data.sources.document import Piece
from d9d_data.sources.find import find_files
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record, refuse
from d9d_data.stream.chat import build_chat
from pydantic import ValidationError

Open = Callable[..., Any]
HELLO = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
ALPACA = {"instruction": "Add.", "input": "1 1", "output": "2"}
TURNS = (("user", "Hi"), ("assistant", "Hello!"))


def turns(record: Any, fields: ChatFormat | None = None) -> tuple[tuple[str, Any], ...]:
    """Roles and contents of a conversation."""
    read = read_conversation(record, "t:1", fields=fields)
    return tuple((message["role"], message["content"]) for message in read.messages)


@pytest.fixture
def stream(model: Path, tmp_path: Path) -> Open:
    """Open a stream of files, each with these records."""

    def build(*files: list[Any], notes: list[str] | None = None, **values: Any) -> Any:
        for number, records in enumerate(files):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / f"{number}.jsonl").write_text(text)
        sources = [str(tmp_path / f"{number}.jsonl") for number in range(len(files))]
        fields = {"sources": sources, "sequence_length": 128, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        context = DataContext(0, 1, 1, tmp_path / "cache", note=note, pretrained=str(model))
        return build_chat(ChatConfig.model_validate(fields), context)

    return build


# --- readings


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": HELLO}, TURNS),
        ({"conversations": json.dumps(HELLO)}, TURNS),
        ({"conversations": tuple(HELLO), "system": "Be kind."}, (("system", "Be kind."), *TURNS)),
        ({"conversations": HELLO, "system": " "}, TURNS),
        ({"conversations": [{"role": role, "content": text} for role, text in TURNS], "id": 1}, TURNS),
        ({"conversations": [*HELLO, HELLO[0]]}, (*TURNS, TURNS[0])),
        ({"conversations": HELLO[1:]}, TURNS[1:]),
        (ALPACA, (("user", "Add.\n1 1"), ("assistant", "2"))),
        ({**ALPACA, "input": ""}, (("user", "Add."), ("assistant", "2"))),
        ({**ALPACA, "input": None, "system": "S", "history": [["a", "b"]]},
         (("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "Add."), ("assistant", "2"))),
        ({**ALPACA, "history": []}, (("user", "Add.\n1 1"), ("assistant", "2"))),
        ({"prompt": "Hi", "response": "Hello!"}, TURNS),
        ({"question": "Hi", "answer": "Hello!"}, TURNS),
        ({"system_prompt": "S", "question": "Hi", "response": "Hello!"}, (("system", "S"), *TURNS)),
        ({"query": "Hi", "response": "Hello!", "type": "x"}, TURNS),
        ({"instruction": "Hi", "context": "there", "response": "Hello!"}, (("user", "Hi\nthere"), TURNS[1])),
        ({"input": "Hi", "output": "Hello!"}, TURNS),
    ],
)  # fmt: skip
def test_public_formats_are_found_by_their_fields(record: Any, expected: Any) -> None:
    assert turns(record) == expected


def test_answers_of_earlier_turns_are_learned_and_messages_of_a_prompt_are_not() -> None:
    assert read_conversation({**ALPACA, "history": [["a", "b"]]}, "t:1").replies == (1, 3)
    messages = [{"role": role, "content": text} for role, text in (*TURNS, TURNS[0])]
    assert read_conversation({"prompt": messages, "response": "Bye."}, "t:1").replies == (3,)


def test_calls_of_sharegpt_are_tool_calls_of_the_assistant() -> None:
    call = {"name": "look", "arguments": {"at": "x"}}
    others = [{"from": "observation", "value": "here"}, {"from": "gpt", "value": "There."}]
    for value in (json.dumps(call), json.dumps([call]), call):
        record = {
            "conversations": [HELLO[0], {"from": "function_call", "value": value}, *others], "tools": json.dumps([call])
        }  # fmt: skip
        read = read_conversation(record, "t:1", "parse")
        assert [message["role"] for message in read.messages] == ["user", "assistant", "tool", "assistant"]
        assert read.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
        assert read.tools == (call,)


def test_other_keys_of_messages_are_kept() -> None:
    reply = {"from": "gpt", "value": "Hello!", "weight": 0.5, "reasoning_content": "hm"}
    read = read_conversation({"conversations": [HELLO[0], reply]}, "t:1")
    expected = {"role": "assistant", "content": "Hello!", "weight": 0.5, "reasoning_content": "hm"}
    assert read.messages[1] == expected


def test_fields_and_roles_can_be_named() -> None:
    said = [{"speaker": "customer", "text": "Hi"}, {"speaker": "agent", "text": "Hello!"}]
    fields = ChatFormat(
        messages="data.dialogue", role="speaker", content="text", roles={"customer": "user", "agent": "assistant"}
    )
    assert turns({"data": {"dialogue": said}}, fields) == TURNS
    fields = ChatFormat(user="q", context="more", assistant="a", system="persona")
    assert turns({"q": "Hi", "a": "Hello!", "persona": "S"}, fields) == (("system", "S"), *TURNS)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]},
         r"conversations\[0\] has the unknown role 'narrator'; use one of human, user, gpt"),
        ({"conversations": [{"from": "humann", "value": "x"}]}, "'humann'; did you mean 'human'"),
        ({"conversations": [{"from": "", "value": "x"}]}, "unknown role ''"),
        ({"conversations": [{"value": "x"}]}, r"conversations\[0\] has no field 'from' \(it has value\)"),
        ({"conversations": [{"from": "human", "value": 3}]}, r"conversations\[0\].value is a number; give a string"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\] of the human has empty content"),
        ({"conversations": ["Hi"]}, r'conversations\[0\] is a string, .* {"from": "human", "value": "..."}'),
        ({"conversations": HELLO[:1]}, "conversations has no assistant message"),
        ({"conversations": []}, "conversations is empty; leave the record out"),
        ({"conversations": "Hi"}, "conversations is a string, not a list"),
        ({"conversations": "[Hi"}, "conversations is a string that is not JSON"),
        ({"conversations": [{"from": "system", "value": "a"}, *HELLO], "system": "b"},
         r"system and conversations\[0\] are two system messages; remove one"),
        ({"conversations": HELLO, "system": 3}, "system is a number; give a string"),
        ({"conversations": [HELLO[0], {"from": "function_call", "value": "look()"}]},
         r"conversations\[1\].value is no tool call in JSON"),
        ({"conversations": [HELLO[0], {"from": "function_call", "value": '{"at": 1}'}]},
         r"conversations\[1\].value is no tool call with a name"),
        ({"conversations": [HELLO[0], {"from": "function_call"}]}, "no tool call with a name"),
        ({**ALPACA, "output": ""}, "t:1: output of the assistant has empty content"),
        ({**ALPACA, "output": 2}, "t:1: output is a number"),
        ({**ALPACA, "instruction": " ", "input": ""}, "instruction of the user has empty content"),
        ({**ALPACA, "input": 1}, "input is a number; give a string"),
        ({**ALPACA, "history": "x"}, "history is a string, not a list"),
        ({**ALPACA, "history": [["a"]]}, r"history\[0\] is no pair of texts"),
        ({**ALPACA, "history": [["a", ""]]}, r"history\[0\]\[1\] of the assistant has empty content"),
        ({"messages": [{"from": "human", "value": "x"}]}, r"messages\[0\] has no field 'role' \(it has from, value\)"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_the_record(record: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        read_conversation(record, "t:1")
    assert str(caught.value).startswith("t:1")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": [], "conversations": []},
         r"messages \(messages\) and sharegpt \(conversations\); choose one .* 'format: messages' or 'format: shar"),
        ({"question": "a", "answer": "b", "query": "a", "response": "b"},
         "'format: {user: question, assistant: answer}'"),
        ({"instruction": "a", "output": "b", "prompt": "a", "completion": "b"}, "alpaca .* and prompt_completion"),
    ],
)  # fmt: skip
def test_fields_of_two_formats_are_refused(record: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"t:1 has the fields of several formats.*{says}"):
        read_conversation(record, "t:1")


# --- the format of a dataset


def test_a_found_format_is_told_with_the_first_record(stream: Open) -> None:
    notes: list[str] = []
    stream([{**ALPACA, "output": "2" * 200}] * 3, notes=notes)
    told = 'chat: records are read as alpaca (instruction, input, output), by the first: {"instruction": "Add.", "inp'
    assert [note[: len(told)] for note in notes if "records are read" in note] == [told]
    assert max(len(note) for note in notes if "records are read" in note) < 220


def test_a_note_of_a_strange_record_can_be_printed() -> None:
    record = Record(
        {"instruction": "\ud800\n" * 99, "output": [{"a": ["b" * 999] * 99}] * 99}, Place(SourceFile.of("a"))
    )
    line = told(chat_format_of(record), record, "chat")
    assert line.encode()
    assert "\n" not in line
    assert len(line) < 200


@pytest.mark.parametrize(
    ("record", "values"),
    [
        ({"messages": [{"role": role, "content": text} for role, text in TURNS]}, {}),
        (ALPACA, {"format": "alpaca"}),
        (ALPACA, {"format": {"user": "instruction", "assistant": "output"}}),
        (ALPACA, {"split": "held_out", "held_out": 0.5}),
    ],
)
def test_named_formats_and_messages_are_not_told(stream: Open, record: Any, values: dict[str, Any]) -> None:
    notes: list[str] = []
    stream([record] * 2, notes=notes, **values)
    assert not any("records are read" in note for note in notes)


def test_a_record_of_another_format_is_refused_with_the_decided_one(stream: Open) -> None:
    files = [[ALPACA], [{"conversations": HELLO, "id": 3}]]
    with pytest.raises(DataError) as caught:
        stream(*files)
    assert (
        "1.jsonl:1 has no field 'instruction' (it has conversations, id), but the records of this dataset are read as "
        "alpaca (instruction, output)" in str(caught.value)
    )
    assert "data.format" in str(caught.value)
    reader = stream(*files, malformed="skip")
    assert (reader.facts["documents"], reader.facts["skipped"]) == (1, 1)


def test_a_file_without_records_does_not_decide(stream: Open) -> None:
    assert stream([], [ALPACA]).facts["documents"] == 1
    with pytest.raises(DataError, match="the corpus is empty"):
        stream([])


@pytest.mark.parametrize("first", [["a"], "text", 3, None])
def test_a_first_record_without_fields_is_refused_or_skipped(stream: Open, first: Any) -> None:
    with pytest.raises(DataError, match=r"0.jsonl:1 has no fields \(it is (a|null)"):
        stream([first, ALPACA])
    reader = stream([first, {"text": "a"}, ALPACA], malformed="skip")
    assert (reader.facts["documents"], reader.facts["skipped"]) == (1, 2)


def test_a_named_format_that_the_first_record_lacks_is_refused(stream: Open) -> None:
    with pytest.raises(DataError, match=r"data.format: .*0.jsonl:1 .*; the formats are sharegpt \(conversations\)"):
        stream([ALPACA], format="sharegpt")


def test_a_choice_solves_an_ambiguity(stream: Open, model: Path) -> None:
    record = {"messages": [{"role": role, "content": text} for role, text in TURNS], "conversations": HELLO[:1]}
    with pytest.raises(DataError, match="data.format: .*several formats"):
        stream([record])
    assert stream([record], format="messages").facts["documents"] == 1


@pytest.mark.thorough
def test_a_resumed_run_keeps_its_format(stream: Open) -> None:
    state = stream([ALPACA]).state()
    stream([ALPACA], format="alpaca").load_state(state)
    with pytest.raises(DataError, match="belongs to other data .*format"):
        stream([ALPACA], format={"user": "instruction", "assistant": "output"}).load_state(state)


def test_the_format_is_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ALPACA))
    pieces = [Piece(found) for found in find_files([str(file)])]

    def key(**fields: str) -> str:
        values = {"sources": [str(file)], "sequence_length": 8, "tokenizer": str(model), "format": fields}
        return corpus_key(ChatConfig.model_validate(values), pieces)

    one = key(user="instruction", assistant="output")
    assert one == key(user="instruction", assistant="output")
    assert one != key(user="instruction", assistant="output", context="input")


def test_worker_processes_get_the_decided_format(model: Path, tmp_path: Path) -> None:
    values = {"sources": ["a.jsonl"], "sequence_length": 64, "tokenizer": str(model), "format": "alpaca"}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ALPACA))
    config = with_format(ChatConfig.model_validate(values), find_files([str(file)]), lambda _text: None)
    encoder, _ = Setup(**json.loads(Setup.of(config, tmp_path).encode())).make_encoder()
    (batch,) = encoder.encode([Piece(found) for found in find_files([str(file)])], refuse)
    assert len(batch.ids) == 1
    file.write_text(json.dumps({"conversations": HELLO}))
    with pytest.raises(DataError, match="are read as alpaca"):
        list(encoder.encode([Piece(found) for found in find_files([str(file)])], refuse))


def test_rows_of_tables_are_read_alike(stream: Open, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    expected = stream([{"conversations": HELLO}]).next_pack()[0]["tokens"].tolist()
    parquet.write_table(pa.Table.from_pylist([{"conversations": HELLO, "system": None}]), tmp_path / "a.parquet")
    assert stream(sources=[str(tmp_path / "a.parquet")]).next_pack()[0]["tokens"].tolist() == expected
    (tmp_path / "a.csv").write_text("instruction,output,input\nHi,Hello!,\n")
    assert stream(sources=[str(tmp_path / "a.csv")]).next_pack()[0]["tokens"].tolist() == expected


# --- the field of the config


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("alpacca", "unknown format 'alpacca'; did you mean 'alpaca'?"),
        ("xyz", "use one of messages, sharegpt, alpaca, prompt_completion, question_answer, or name fields"),
        (3, "use one of messages, sharegpt"),
        ({}, "name the field of a list of messages in messages, or two fields in user and assistant"),
        ({"user": "a"}, "two fields in user and assistant"),
        ({"user": "a", "assistant": "a"}, "user and assistant are both 'a'"),
        ({"messages": "m", "user": "a"}, "user does not go with messages"),
        (
            {"messages": "m", "roles": {"agent": "asistant"}},
            "agent: unknown role 'asistant'; did you mean 'assistant'?",
        ),
        ({"messages": "m", "roles": {"agent": "x"}}, "use one of system, developer"),
        ({"mesages": "m"}, "did you mean 'messages'?"),
    ],
)
def test_formats_of_the_job_file_are_checked(value: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatConfig.model_validate({"sources": ["a.jsonl"], "sequence_length": 8, "format": value})
    assert says in str(caught.value)
