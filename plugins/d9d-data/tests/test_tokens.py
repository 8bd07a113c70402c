"""The dataset ``tokens``: records that are tokenised already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import ChatConfig, TokensConfig
from d9d_data.stream.chat import build_chat, build_tokens
from pydantic import ValidationError

Open = Callable[..., Any]


@pytest.fixture
def stream(model: Path, tmp_path: Path) -> Open:
    """Open a stream of these records."""

    def build(*records: Any, notes: list[str] | None = None, file: Path | None = None, **values: Any) -> Any:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        source = str(file or tmp_path / "rows.jsonl")
        fields = {"sources": [source], "sequence_length": 64, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        context = DataContext(0, 1, 1, tmp_path / "cache", note=note, pretrained=str(model))
        return build_tokens(TokensConfig.model_validate({"bucket_window": 1, **fields}), context)

    return build


def targets(stream: Any) -> list[int]:
    """Targets of the next sample, without padding."""
    (batch,) = stream.next_pack()
    return [int(target) for target in batch["targets"][0, : int(batch["lengths"][0])]]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"input_ids": [5, 6, 7, 8]}, [6, 7, 8]),
        ({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, [-100, 7, 8]),
        ({"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, -100]}, [-100, 7, -100]),
        ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}, [-100, 7, 8]),
        ({"input_ids": [5, 6, 7, 8], "completion_mask": [False, False, True, True]}, [-100, 7, 8]),
        ({"input_ids": [5, 6, 7, 8], "assistant_masks": [0.0, 1.0, 1.0, 0.0]}, [6, 7, -100]),
        ({"input_ids": [5, 6, 7, 256], "attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}, [6, 7]),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "text": "x"}, [6, 7]),
    ],
)  # fmt: skip
def test_labels_and_masks_belong_to_the_token_at_their_position(stream: Open, record: Any, expected: Any) -> None:
    assert targets(stream(record)) == expected


def test_the_field_with_the_tokens_to_learn_is_told_or_named(stream: Open) -> None:
    record = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": [0, 0, 1]}
    with pytest.raises(DataError, match=r"jsonl:1 has labels and loss_mask; .* 'labels: labels' or 'mask: loss_mask'"):
        stream(record)
    notes: list[str] = []
    assert targets(stream(record, mask="loss_mask", notes=notes)) == [-100, 7]
    assert not any(note.startswith("tokens:") for note in notes)
    stream({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, notes=notes)
    assert any(note.startswith("tokens: the tokens to learn are in labels, by the first record") for note in notes)
    assert targets(stream({"ids": [5, 6, 7], "m": [0, 0, 1]}, ids="ids", mask="m")) == [-100, 7]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"ids": [1]}, r"has no field 'input_ids' \(it has ids\)"),
        ({"input_ids": [], "labels": []}, "input_ids is empty; leave the record out"),
        ({"input_ids": "1 2", "labels": []}, "input_ids is a string, not a list of numbers"),
        ({"input_ids": [[1, 2]], "labels": [1]}, r"input_ids\[0\] is \[1, 2\]; give whole numbers"),
        ({"input_ids": [1, [2]], "labels": [1]}, r"input_ids\[1\] is \[2\]; give whole numbers"),
        ({"input_ids": [1, None], "labels": [1, 2]}, r"input_ids\[1\] is None; give whole numbers"),
        ({"input_ids": [1, 2.5], "labels": [1, 2]}, r"input_ids\[1\] is 2.5; give whole numbers"),
        ({"input_ids": [1, 2**70], "labels": [1, 2]}, r"\[1\] is 11805.*; give whole numbers of at most 64 bits"),
        ({"input_ids": [1, 259], "labels": [1, 2]}, r"input_ids\[1\] is 259, but the tokenizer has the ids 0 to 258"),
        ({"input_ids": [1, -1], "labels": [1, 2]}, r"input_ids\[1\] is -1"),
        ({"input_ids": [1, 2]}, "has no field 'labels'"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values, but input_ids has 2"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 4]}, r"labels\[2\] is 4, but input_ids\[2\] is 3; .*repair it"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "they are shifted already; store each label at the"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 1]}, "ones and then zeros; store the tokens"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1]}, "attention_mask is not 2 numbers"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 0]}, "there is no token; leave the record out"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused_with_their_place_or_skipped(stream: Open, record: Any, says: str) -> None:
    good = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    with pytest.raises(DataError, match=f"rows.jsonl:2.*{says}"):
        stream(good, record)
    assert stream(good, record, malformed="skip").facts["skipped"] == 1


def test_masks_are_zeros_and_ones_and_later_labels_are_not_ignored(stream: Open) -> None:
    with pytest.raises(DataError, match=r"loss_mask\[1\] is 2; give 0 or 1"):
        stream({"input_ids": [5, 6], "loss_mask": [0, 2]})
    with pytest.raises(DataError, match="rows.jsonl:2 has labels, but the first record has neither"):
        stream({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5, 6]})


def test_long_records_are_cut_and_records_with_nothing_to_learn_are_left_out(stream: Open) -> None:
    long = {"input_ids": list(range(100)), "labels": [-100] * 10 + list(range(10, 100))}
    nothing = {"input_ids": [5, 6], "labels": [-100, -100]}
    notes: list[str] = []
    reader = stream(long, nothing, notes=notes)
    assert targets(reader) == [-100] * 9 + list(range(10, 65))
    assert (reader.facts["cut_documents"], reader.facts["incomplete"], reader.facts["dropped"]) == (1, 1, 1)
    assert any("cut 1 of 2 records to 65 tokens" in note for note in notes)
    with pytest.raises(DataError, match="100 tokens, but a sequence at most 65"):
        stream(long, too_long="error")


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["none", "concat", "best_fit"])
def test_rows_of_a_chat_give_the_samples_of_the_chat(stream: Open, model: Path, tmp_path: Path, packing: str) -> None:
    chats = [{"prompt": "q" * n, "completion": "a" * (n % 3 + 1)} for n in range(1, 9)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats))
    fields: dict[str, Any] = {"sequence_length": 72, "shuffle": False, "packing": packing}
    context = DataContext(0, 1, 1, tmp_path / "cache", note=lambda _text: None, pretrained=str(model))
    chat = build_chat(ChatConfig.model_validate({"sources": [str(tmp_path / "chats.jsonl")], **fields}), context)
    corpus = chat._corpus
    assert corpus.weights is not None
    rows = []
    for begin, end in zip(corpus.starts[:-1], corpus.starts[1:], strict=True):
        ids = corpus.tokens[begin:end].tolist()
        learned = corpus.weights[begin:end].tolist()
        labels = [number if is_learned else -100 for number, is_learned in zip(ids, learned, strict=True)]
        rows.append({"input_ids": ids, "labels": labels})
    reader = stream(*rows, **fields, bucket_window=None)
    assert {name: reader.facts[name] for name in chat.facts} == chat.facts
    for _ in range(chat.facts["samples"]):
        (one,), (other,) = chat.next_pack(), reader.next_pack()
        assert {name: value.tolist() for name, value in one.items()} == {
            name: value.tolist() for name, value in other.items()
        }


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_of_tables_are_read_alike(stream: Open, tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9, 9], "labels": [-100, -100, 9]}]
    kinds = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int64())})
    table = pa.Table.from_pylist(rows, schema=kinds)
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, kinds) as writer:
            writer.write_table(table)
    reader = stream(file=file)
    assert [targets(reader), targets(reader)] == [[6, 7], [-100, 9]]


def test_the_tokenizer_is_needed_and_fields_without_effect_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [5, 6]}\n')
    given = {"sources": [str(tmp_path / "rows.jsonl")], "sequence_length": 8}
    with pytest.raises(DataError, match=r"data.tokenizer: the dataset tokens needs the tokenizer that made the ids"):
        build_tokens(TokensConfig.model_validate(given), DataContext(0, 1, 1, tmp_path / "cache"))
    for values, says in (
        ({"labels": "a", "mask": "b"}, "labels and mask exclude each other"),
        ({"special_tokens": "token"}, "special_tokens has no effect"),
        ({"end_of_text": "x"}, "end_of_text has no effect"),
        ({"tokenizer": {"bpe": 300}}, "tokenizer"),
    ):
        with pytest.raises(ValidationError, match=says):
            TokensConfig.model_validate({**given, **values})


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (None, "all 2 records are too long for 65 tokens, or have no token to learn (the longest has 90)"),
        (0, "all 2 records are too long for 65 tokens, or have no token to learn (the longest has 90)"),
        (70, "none of the 2 records has a token to learn in its first 65 tokens: their prompts alone have 70 tokens"),
    ],
)
def test_records_without_a_token_to_learn_say_which_length_has_one(stream: Open, first: int | None, says: str) -> None:
    records = [
        {"input_ids": [5] * size, "loss_mask": [int(place == first) for place in range(size)]} for size in (90, 80)
    ]
    with pytest.raises(DataError) as caught:
        stream(*records)
    assert says in str(caught.value)
