"""The dataset ``pairs``: queries with documents that answer them, each text a row that ends with its end of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.cli.samples import samples_of
from d9d_data.config import PairsConfig
from d9d_data.stream.documents import DocumentStream, build_documents
from pydantic import ValidationError

END = 256
Open = Callable[..., DocumentStream]


@pytest.fixture
def stream(tmp_path: Path) -> Open:
    def build(*records: Any, notes: list[str] | None = None, batch: int = 0, **values: Any) -> DocumentStream:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {"sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": 16, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        batch = batch or len(records)
        context = DataContext(0, batch, batch, tmp_path / "cache", note=note)
        return build_documents(PairsConfig.model_validate(fields), context)

    return build


def rows(stream: DocumentStream) -> list[str]:
    """Texts of the rows of a pack, without their ends."""
    (batch,) = stream.next_pack()
    found = []
    for tokens, length in zip(batch["tokens"].tolist(), batch["lengths"].tolist(), strict=True):
        assert tokens[length - 1] == END
        found.append(bytes(tokens[: length - 1]).decode())
    return found


def test_rows_are_queries_followed_by_their_documents(stream: Open) -> None:
    records = [
        {"query": "q1", "positive": "yes", "negatives": ["no", "never"]},
        {"query": "longer q2", "positive": "a", "negatives": ["b", "c"]},
    ]
    fields = {"negatives": 2, "query_prefix": "Q: ", "document_prefix": "D: "}
    reader = stream(*records, **fields)
    (batch,) = reader.next_pack()
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("tokens", "positions", "documents"), (8, 16)), "lengths": (8,), "samples": (2,)
    }  # fmt: skip
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert batch["samples"].tolist() == [0, 1]
    first, second = ["Q: q1", "D: yes", "D: no", "D: never"], ["Q: longer q2", "D: a", "D: b", "D: c"]
    assert rows(stream(*records, **fields)) == [*first, *second]
    facts = reader.facts
    assert (facts["samples"], facts["texts_per_sample"], facts["vocab_size"], facts["sequence_length"]) == (
        2,
        4,
        257,
        16,
    )
    assert [sample.name for sample, _ in zip(samples_of(reader), range(4), strict=False)] == [
        "query", "positive", "negative 1", "negative 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "fields", "expected"),
    [
        ({"query": "a", "positive": "b", "negative": "c"}, {}, ["a", "b"]),
        ({"query": "a", "positive": "b", "negative": "c"}, {"negatives": 1}, ["a", "b", "c"]),
        ({"q": "a", "m": {"d": "b"}, "hard": ["c"]},
         {"query": "q", "positive": "m.d", "negative": "hard", "negatives": 1}, ["a", "b", "c"]),
    ],
)  # fmt: skip
def test_fields_have_any_names(
    stream: Open, record: dict[str, Any], fields: dict[str, Any], expected: list[str]
) -> None:
    assert rows(stream(record, **fields)) == expected


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"query": "a"}, {}, r"has no text in positive \(it has query\)"),
        ({"query": " ", "positive": "b"}, {}, "has no text in query"),
        ({"query": "b", "positive": "b"}, {}, "query and positive are equal"),
        (
            {"query": "a", "positive": "b", "negative": "c"},
            {"negatives": 2},
            "has 1 negatives in negative, but data.neg",
        ),
        ({"query": "a", "positive": "b"}, {"negatives": 1}, "has 0 negatives in negative"),
        ({"query": "a", "positive": "b", "negatives": ["c", ""]}, {"negatives": 2}, r"has no text in negatives\[1\]"),
    ],
)
def test_what_lacks_a_text_is_refused_with_its_place_or_skipped(
    stream: Open, record: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    good = {"query": "a", "positive": "b", "negatives": ["c"] * fields.get("negatives", 0)}
    with pytest.raises(DataError, match=rf"pairs.jsonl:2:? .*{message}"):
        stream(good, record, **fields)
    reader = stream(good, record, malformed="skip", batch=1, **fields)
    assert (reader.facts["samples"], reader.facts["skipped"]) == (1, 1)


def test_a_long_text_keeps_its_end_and_is_counted(stream: Open) -> None:
    notes: list[str] = []
    reader = stream({"query": "x" * 15, "positive": "y" * 16}, notes=notes)
    assert rows(reader) == ["x" * 15, "y" * 15]
    assert reader.facts["cut_documents"] == 1
    assert any("cut 1 of 1 pairs to 16 tokens, longest 17" in note for note in notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer": {"bpe": 300}}, "cannot be trained on pairs"),
        ({"query": "text", "positive": "text"}, "query and positive are both 'text'; name two fields"),
        ({"negative": "other"}, "negative has no effect without negatives"),
    ],
)
def test_fields_that_make_no_pairs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PairsConfig.model_validate({"sources": ["a.jsonl"], "sequence_length": 8, **fields})
