"""Formats of preference pairs: found by the first record, or named in the job file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.chat.formats import preference_format_of
from d9d_data.chat.preference import Pair, read_pair
from d9d_data.config import PreferenceConfig, PreferenceFormat
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record
from d9d_data.stream.chat import build_preference
from pydantic import ValidationError

ASKED = [{"from": "human", "value": "Hi"}]
SIDES = {"chosen": {"from": "gpt", "value": "Hello!"}, "rejected": {"from": "gpt", "value": "No."}}
SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "Hi"}


def reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


EXPECTED = ([USER], reply("Hello!"), reply("No."))


def found(record: dict[str, Any]) -> Any:
    return preference_format_of(Record(record, Place(SourceFile.of("t.jsonl"), 1)))


def read(record: dict[str, Any]) -> Pair:
    return read_pair(record, "t:1", found(record).fields)


@pytest.mark.parametrize(
    ("record", "name", "expected"),
    [
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}, "prompt", ("Hi", "Hello!", "No.")),
        ({"question": "Hi", "chosen": "Hello!", "rejected": "No."}, "question", ([USER], "Hello!", "No.")),
        ({"system": "S", "question": "Hi", "chosen": reply("Hello!"), "rejected": reply("No.")}, "question",
         ([SYSTEM, USER], *EXPECTED[1:])),
        ({"instruction": "Hi", "input": "", "chosen": "Hello!", "rejected": "No."}, "instruction",
         ([USER], "Hello!", "No.")),
        ({"instruction": "Hi", "input": "you", "chosen": "Hello!", "rejected": "No."}, "instruction",
         ([{"role": "user", "content": "Hi\nyou"}], "Hello!", "No.")),
        ({"conversations": ASKED, **SIDES}, "sharegpt", EXPECTED),
        ({"conversations": json.dumps(ASKED), **SIDES}, "sharegpt", EXPECTED),
        ({"conversations": [USER], "chosen": reply("Hello!"), "rejected": reply("No.")}, "sharegpt", EXPECTED),
        ({"conversations": [USER], "chosen": reply("Hello!")[0], "rejected": reply("No.")[0]}, "sharegpt", EXPECTED),
        ({"conversations": ASKED, "system": "S", **SIDES}, "sharegpt", ([SYSTEM, USER], *EXPECTED[1:])),
        ({"chosen": [USER, *reply("Hello!")], "rejected": [USER, *reply("No.")]}, "dialogues", EXPECTED),
        ({"chosen": [*ASKED, SIDES["chosen"]], "rejected": [*ASKED, SIDES["rejected"]]}, "dialogues", EXPECTED),
    ],
)  # fmt: skip
def test_public_formats_are_found_by_their_fields(record: dict[str, Any], name: str, expected: Any) -> None:
    pair = read(record)
    assert (found(record).name, (pair.prompt, pair.chosen, pair.rejected)) == (name, expected)


def test_fields_can_be_named() -> None:
    fields = PreferenceFormat(user="data.q", chosen="good", rejected="bad", system="persona")
    pair = read_pair({"data": {"q": "Hi"}, "good": "Hello!", "bad": "No.", "persona": "S"}, "t:1", fields)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([SYSTEM, USER], "Hello!", "No.")


@pytest.mark.parametrize("as_text", [False, True])
def test_lists_in_csv_files_are_parsed_if_any_key_has_another_name(as_text: bool) -> None:
    record: dict[str, Any] = {"prompt": [{"role": "user", "text": "Hi"}]}
    record |= {
        side: [{"role": "assistant", "text": text}] for side, text in (("chosen", "Hello!"), ("rejected", "No."))
    }
    record = {name: json.dumps(value) for name, value in record.items()} if as_text else record
    pair = read_pair(record, "t:1", PreferenceFormat(prompt="prompt", content="text"))
    assert (pair.prompt, pair.chosen, pair.rejected) == EXPECTED


def test_a_system_message_precedes_the_common_beginning_of_whole_conversations() -> None:
    record: dict[str, Any] = {"s": "S", "chosen": [USER, *reply("Hello!")], "rejected": [USER, *reply("No.")]}
    pair = read_pair(record, "t:1", PreferenceFormat(system="s"))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([SYSTEM, USER], *EXPECTED[1:])
    twice = record | {side: [SYSTEM, *record[side]] for side in ("chosen", "rejected")}
    with pytest.raises(DataError, match=r"s and chosen\[0\] are two system messages"):
        read_pair(twice, "t:1", PreferenceFormat(system="s"))


@pytest.mark.parametrize("prompt", [{"prompt": "Hi"}, {}])
def test_a_system_message_of_texts_is_refused_because_no_template_would_render_it(prompt: dict[str, str]) -> None:
    record = {"s": "S", "chosen": "Hi Hello!", "rejected": "Hi No.", **prompt}
    fields = PreferenceFormat(system="s", **dict.fromkeys(prompt, "prompt"))
    with pytest.raises(DataError, match="^t:1: s is a system message, but the prompt is a text that no chat template"):
        read_pair(record, "t:1", fields)
    del record["s"]
    assert read_pair(record, "t:1", fields).prompt == "Hi"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a"}, r"no known format \(it has text\); the formats are prompt \(prompt and chosen and rejected\)"),
        ({"prompt": "a", "question": "a", "chosen": "b", "rejected": "c"}, "several formats, prompt .* and question"),
        ({"question": "", "chosen": "b", "rejected": "c"}, "question of the user has empty content"),
        ({"question": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"conversations": ASKED, **SIDES, "chosen": {"from": "narrator", "value": "x"}},
         r"chosen\[0\] has the unknown role 'narrator'"),
        ({"conversations": [{"from": "system", "value": "a"}, *ASKED], "system": "b", **SIDES},
         r"system and conversations\[0\] are two system messages"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_the_record(record: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read(record)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("sharegtp", "did you mean 'sharegpt'?"),
        ({"prompt": "a", "user": "b"}, "prompt and user exclude each other"),
        ({"context": "a"}, "context has no effect without user"),
        ({"chosen": "rejected"}, "chosen and rejected are both 'rejected'"),
    ],
)
def test_formats_of_the_job_file_are_checked(value: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PreferenceConfig.model_validate({"sources": ["a.jsonl"], "sequence_length": 8, "format": value})
    assert says in str(caught.value)


@pytest.fixture
def stream(model: Path, tmp_path: Path) -> Callable[..., Any]:
    def build(*records: dict[str, Any], notes: list[str] | None = None, **values: Any) -> Any:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {"sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 64, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        context = DataContext(0, 1, 1, tmp_path / "cache", note=note, pretrained=str(model))
        return build_preference(PreferenceConfig.model_validate(fields), context)

    return build


@pytest.mark.thorough
def test_formats_give_the_same_tokens_and_are_told(stream: Callable[..., Any]) -> None:
    records = [
        {"prompt": [USER], "chosen": reply("Hello!"), "rejected": reply("No.")},
        {"question": "Hi", "chosen": "Hello!", "rejected": "No."},
        {"conversations": ASKED, **SIDES},
    ]
    packs, told = [], []
    for record in records:
        notes: list[str] = []
        (batch,) = stream(record, notes=notes).next_pack()
        packs.append((batch["tokens"].tolist(), batch["targets"].tolist()))
        told.append([note.split(",")[0] for note in notes if "records are read" in note])
    assert packs[1:] == packs[:1] * 2
    assert told == [[], ["preference: records are read as question (question"],
                    ["preference: records are read as sharegpt (conversations"]]  # fmt: skip


def test_a_record_of_another_format_is_refused(stream: Callable[..., Any]) -> None:
    record = {"question": "Hi", "chosen": "Hello!", "rejected": "No."}
    with pytest.raises(DataError, match=r"pairs.jsonl:2 has no field 'question' .* are read as question"):
        stream(record, {"conversations": ASKED, **SIDES})
