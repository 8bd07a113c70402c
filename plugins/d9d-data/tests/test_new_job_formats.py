"""``d9d new job`` reads the formats of the datasets ``chat`` and ``preference``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError, JobError
from d9d_data.new_job import found
from d9d_data.new_job.found import Model, Records, look_at_records, proposed_length
from d9d_data.new_job.kinds import KINDS
from d9d_data.tokenizer.byte_level import BytesTokenizer

SIDES = {"chosen": "b", "rejected": "c"}


def looked(directory: Path, kind: str, record: dict[str, Any]) -> Any:
    file = directory / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return look_at_records([str(file)], KINDS[kind], None).fields


@pytest.mark.parametrize(
    ("kind", "record", "fields"),
    [
        ("sft", {"messages": []}, {}),
        ("sft", {"conversations": []}, {"format": "sharegpt"}),
        ("lora", {"instruction": "a", "input": "", "output": "b"}, {"format": "alpaca"}),
        ("dpo", {"prompt": "a", **SIDES}, {}),
        ("dpo", SIDES, {}),
        ("dpo", {"question": "a", **SIDES}, {"format": "question"}),
    ],
)
def test_the_format_of_records_becomes_a_field_of_the_job(
    tmp_path: Path, kind: str, record: dict[str, Any], fields: dict[str, str]
) -> None:
    assert looked(tmp_path, kind, record) == fields


def written(file: Path, *records: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def bytes_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of a tokenizer that makes one token of each byte."""
    made = {"tokens": BytesTokenizer("<|endoftext|>")}
    monkeypatch.setattr(found, "make_tokenizer", lambda choice, _end, _texts: made[choice])
    return Path("tokens")


def test_the_longest_of_the_first_records_proposes_the_length(tmp_path: Path, bytes_tokenizer: Path) -> None:
    texts = ["a" * 30, "a" * 100, *["a"] * 198, "a" * 999]
    one = written(tmp_path / "a.jsonl", *({"text": text, "id": 3, "none": None} for text in texts))
    other = written(tmp_path / "b.jsonl", {"body": "b" * 40})
    end = len(BytesTokenizer("<|endoftext|>").encode(["a"])[0]) - 1
    records = look_at_records([one, other], KINDS["pretrain"], bytes_tokenizer)
    assert records == Records((one, other), 202, {"field": "text"}, 100 + end, 0, ("id", "body"), False)
    assert look_at_records([other], KINDS["pretrain"], None) == Records((other,), 1, {"field": "body"}, None, few=True)


def test_records_of_the_first_twenty_files_are_looked_at(tmp_path: Path, bytes_tokenizer: Path) -> None:
    files = [
        written(tmp_path / f"{number:02}.jsonl", {"text": "a" * number, f"of_{number}": 1}) for number in range(1, 22)
    ]
    records = look_at_records(files, KINDS["pretrain"], bytes_tokenizer)
    end = len(BytesTokenizer("<|endoftext|>").encode(["a"])[0]) - 1
    assert (records.count, records.longest) == (21, 20 + end)
    assert records.unused == tuple(f"of_{number}" for number in range(1, 21))


@pytest.mark.parametrize(("count", "few"), [(1, True), (19, True), (20, False), (21, False)])
def test_a_twentieth_of_few_records_is_less_than_one(tmp_path: Path, count: int, few: bool) -> None:
    file = written(tmp_path / "a.jsonl", *[{"text": "a"}] * count)
    assert look_at_records([file], KINDS["pretrain"], None).few is few
    texts = [tmp_path / f"{number:02}.txt" for number in range(count)]
    for text in texts:
        text.write_text("a")
    plain = look_at_records(list(map(str, texts)), KINDS["pretrain"], None)
    assert plain == Records(tuple(map(str, texts)), -1, {}, None, few=few)


def test_records_are_counted_and_labels_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found._LABELS_LOOKED_AT == 20_000
    monkeypatch.setattr(found, "_LABELS_LOOKED_AT", 5)
    names = iter("abcdefgh")
    one, two, three = (
        written(tmp_path / f"{size}.jsonl", *[{"text": "x", "label": next(names)} for _ in range(size)])
        for size in (2, 3, 1)
    )

    def counted(*files: str) -> tuple[int, int, bool]:
        records = look_at_records(files, KINDS["classification"], None)
        return records.count, records.classes, records.few

    assert counted(one) == (2, 2, True)
    assert counted(one, two) == (5, 5, True)
    assert counted(one, two, three) == (-1, 5, False)
    numbers = written(tmp_path / "numbers.jsonl", *[{"text": "x", "label": number} for number in (0, 6, 2)])
    assert counted(numbers) == (3, 7, True)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"negative": "c"}, {"negative": "negative", "negatives": "1"}),
        ({"neg": ["c", "d", "e"]}, {"negative": "neg", "negatives": "3"}),
        ({"hard_negatives": ["c"], "other": 1}, {"negative": "hard_negatives", "negatives": "1"}),
        ({"negatives": []}, {}),
        ({}, {}),
    ],
)
def test_negatives_of_pairs_are_counted(tmp_path: Path, record: dict[str, Any], fields: dict[str, str]) -> None:
    found_fields = look_at_records(
        [written(tmp_path / "a.jsonl", {"anchor": "a", "positive": "b"} | record)], KINDS["embedding"], None
    ).fields
    # A field of the usual name needs no line.
    expected = {name: value for name, value in fields.items() if name != value}
    assert found_fields == {"query": "anchor", **expected}


@pytest.mark.parametrize(
    ("longest", "positions", "length"),
    [
        (None, None, 4096), (None, 512, 512), (0, None, 64), (1, None, 128), (53, None, 128), (54, None, 128),
        (100, None, 192), (100, 150, 150), (107, None, 192), (108, None, 256), (3360, None, 4096), (9000, None, 4096),
        (9000, 8192, 4096),
    ],
)  # fmt: skip
def test_the_proposed_length_has_room_for_longer_records(
    longest: int | None, positions: int | None, length: int
) -> None:
    model = None if positions is None else Model("m", "m", "m", 0, positions, False, False, None, False)
    assert proposed_length(Records((), 1, {}, longest), model) == length


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({}, ("", None, True, False)),
        ({"model_type": "a", "max_position_embeddings": 64, "tie_word_embeddings": False}, ("a", 64, False, False)),
        ({"max_position_embeddings": 0, "d9d": {"mtp": {"depths": 0}}}, ("", None, True, False)),
        ({"max_position_embeddings": 1, "d9d": {"mtp": {"depths": 1}}}, ("", 1, True, True)),
        ({"max_position_embeddings": "64", "d9d": {"mtp": 3}, "tie_word_embeddings": None}, ("", None, True, False)),
        ({"text_config": {"max_position_embeddings": 8, "tie_word_embeddings": False}}, ("", 8, False, False)),
        ({"text_config": {"max_position_embeddings": 8}, "max_position_embeddings": 9}, ("", 9, True, False)),
        ({"text_config": 5, "d9d": 5}, ("", None, True, False)),
    ],
)
def test_facts_about_a_model_come_from_its_config_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], facts: tuple[str, int | None, bool, bool]
) -> None:
    monkeypatch.setattr(found, "find_model", lambda directory, _registry: (f"plugin of {directory}", None))
    registry: Any = None
    name, (kind, positions, tied, further) = str(tmp_path), facts
    (tmp_path / "config.json").write_text(json.dumps(config))
    for size in (3, 4):
        (tmp_path / f"{size}.safetensors").write_bytes(b"x" * size)
    expected = Model(name, f"plugin of {name}", kind, 7, positions, tied, further, None, False)
    assert found.look_at_model(name, registry) == expected
    (tmp_path / "tokenizer.json").write_text("{}")
    assert found.look_at_model(name, registry).tokenizer == tmp_path
    assert not found.look_at_model(name, registry).template
    (tmp_path / "chat_template.jinja").write_text("x")
    assert found.look_at_model(name, registry).template


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("someone/model-1.0", "; download it: hf download someone/model-1.0 --local-dir ./model-1.0"),
        ("model", ""),
        ("a/b/c", ""),
        ("./a b/c", ""),
    ],
)
def test_a_model_that_is_not_here_may_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: str
) -> None:
    monkeypatch.chdir(tmp_path)
    registry: Any = None
    with pytest.raises(JobError) as caught:
        found.look_at_model(name, registry)
    assert str(caught.value) == f"--model: {name} does not exist{more}"


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_unknown_records_are_refused_with_the_formats(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"--data: .*a.jsonl:1 has the fields of no known format \(it has text\)"):
        looked(tmp_path, kind, {"text": "a"})
