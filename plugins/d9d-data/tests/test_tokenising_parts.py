"""Parts of tokenising, exactly: batches of texts, counts of records, and a worker process that answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError, TrainingError
from d9d_data.corpus import encoder, pool
from d9d_data.corpus.encoder import Dropped, Sample, TextEncoder, encode_samples
from d9d_data.corpus.fit import Limit, Tally
from d9d_data.corpus.plan import Shard
from d9d_data.sources.document import Piece
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Numbering, Place, Record

# --- batches and counts -----------------------------------------------------------------------------------------------


class Letters:
    """Tokenizer with a token per character, and 0 at the end of a text; it spells ``<s>``."""

    vocab_size = 300

    def encode(self, texts: Sequence[str]) -> list[Any]:
        return [np.asarray([ord(letter) for letter in text], dtype=np.uint32) for text in texts]

    def ended(self, ids: Any) -> Any:
        return np.append(ids, np.uint32(0))

    def spelled(self, texts: Sequence[str]) -> str:
        return next(("<s>" for text in texts if "<s>" in text), "")


def encoded(texts: Sequence[str], limit: Limit | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(encoder, "texts_of", lambda _piece, _reject: texts)
    made = TextEncoder(Letters(), limit)  # type: ignore[arg-type]
    return list(made.encode([Piece(SourceFile("a.txt", "text"))], lambda place, _problem: pytest.fail(str(place))))


def test_texts_are_encoded_in_batches_that_end_with_the_text_that_reaches_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "_BATCH_CHARACTERS", 5)
    found = encoded(["abc", " ", "de", "f", "ghijkl", "", "m<s>"], None, monkeypatch)
    assert [len(batch.ids) for batch in found] == [2, 2, 1]
    assert [batch.characters for batch in found] == [5, 7, 4]
    assert [list(batch.numbers) for batch in found] == [[0, 1], [2, 3], [4]]
    assert [batch.tally for batch in found] == [
        Tally(records=2, longest=4), Tally(records=2, longest=7),
        Tally(records=1, longest=5, spelled=1, spelling="<s>"),
    ]  # fmt: skip
    assert found[0].ids[1].tolist() == [ord("d"), ord("e"), 0]
    assert len(encoded(["abcd", "e"], None, monkeypatch)) == 1


@pytest.mark.parametrize(
    ("policy", "texts", "lost", "counts"),
    [
        ("cut_end", [[97, 0], [98, 99, 0], [101, 102, 103]], [0, 0, 2], {"cut": 1}),
        ("cut_start", [[97, 0], [98, 99, 0], [103, 104, 0]], [0, 0, 2], {"cut": 1}),
        ("drop", [[97, 0], [98, 99, 0]], [], {"dropped": 1}),
    ],
)
def test_texts_beyond_the_limit_are_cut_or_left_out_and_counted(
    policy: Any, texts: list[list[int]], lost: list[int], counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = encoded(["a", "bc", "efgh"], Limit(3, policy), monkeypatch)
    assert [ids.tolist() for ids in found.ids] == texts
    assert (list(found.lost), found.tally) == (lost, Tally(records=3, longest=5, **counts))
    assert list(found.numbers) == [0, 1, 2][: len(texts)]
    (whole,) = encoded(["a", "bc"], Limit(3, policy), monkeypatch)
    assert (list(whole.lost), whole.tally) == ([], Tally(records=2, longest=3))


def test_samples_are_joined_in_batches_with_the_counts_of_all_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_BATCH_SAMPLES", 2)
    one, two = np.asarray([1], dtype=np.uint32), np.asarray([2, 3], dtype=np.uint32)

    def sample(lost: Sequence[int], **facts: Any) -> Sample:
        return Sample([one, two], {"weights": [one > 0, two > 2]}, lost, **facts)

    made: list[Any] = [
        sample([0, 0], stop="</s>"),
        Dropped(9, 4),
        DataError("a.jsonl:3: is bad"),
        sample([5, 1], incomplete=True, spelling="<s>", parsed=True),
        Dropped(7),
    ]
    records = [Record({}, Place(SourceFile("a.jsonl", "jsonl"), number)) for number in range(1, 6)]
    monkeypatch.setattr(encoder, "read_records", lambda _file, _begin, _end, reject: records)

    def encode(record: Record) -> Any:
        found = made[int(str(record.place).rpartition(":")[2]) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    rejected: list[tuple[str, str]] = []
    first, rest = encode_samples(
        [Piece(SourceFile("a.jsonl", "jsonl"))], lambda place, text: rejected.append((place.exact(), text)), encode
    )
    assert rejected == [("a.jsonl:3", "is bad")]
    assert [ids.tolist() for ids in first.ids] == [[1], [2, 3], [1], [2, 3]]
    assert [values.tolist() for values in first.columns["weights"]] == [[True], [False, True]] * 2
    assert (list(first.lost), first.characters) == ([0, 0, 5, 1], 4 * 6)
    assert list(first.numbers) == [0, 0, 3, 3]
    assert first.tally == Tally(
        records=3, longest=9, cut=1, incomplete=1, dropped=1, spelled=1, needed=4, spelling="<s>", parsed=1,
        stops={"</s>": 1},
    )  # fmt: skip
    assert (list(rest.ids), dict(rest.columns), rest.characters) == ([], {}, 0)
    assert rest.tally == Tally(records=1, longest=7, dropped=1)


# --- worker processes -------------------------------------------------------------------------------------------------


def test_cores_are_shared_by_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(pool.subprocess, "Popen", lambda _command, env, **_pipes: started.append(env))
    monkeypatch.setattr(pool.os, "cpu_count", lambda: 7)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert pool.default_workers() == 7
    for workers in (1, 3, 7, 9):
        pool._start(workers)
    monkeypatch.setattr(pool.os, "cpu_count", lambda: None)
    pool._start(1)
    assert pool.default_workers() == 1
    monkeypatch.setattr(pool.os, "cpu_count", lambda: 9)
    assert pool.default_workers() == 8
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    pool._start(1)
    assert [env["RAYON_NUM_THREADS"] for env in started] == ["7", "2", "1", "1", "1", "5"]


def tokenised(*answers: dict[str, Any]) -> tuple[list[int], str]:
    """Bytes that are told as read, and the request, of a worker with these answers."""
    sent, read = list[str](), list[int]()
    process: Any = SimpleNamespace(
        stdin=SimpleNamespace(write=sent.append, flush=lambda: None),
        stdout=iter([json.dumps(answer) + "\n" for answer in answers]),
        wait=lambda: -9,
    )
    pool._tokenise(process, Shard("000000-a", (), 10), read.append)
    return read, "".join(sent)


def test_a_shard_tells_its_size_as_read_in_all() -> None:
    read, sent = tokenised({"read": 4}, {"read": 3}, {"done": True}, {"read": 1})
    assert read == [4, 3, 3]
    assert "000000-a" in sent
    assert tokenised({"read": 8}, {"read": 8}, {"done": True})[0] == [8, 2, 0]
    with pytest.raises(DataError, match="^it is bad$"):
        tokenised({"read": 4}, {"error": "it is bad"})
    with pytest.raises(TrainingError, match=r"a tokenising process died \(exit status -9\); if memory ran out"):
        tokenised({"read": 4})


def test_a_worker_that_is_gone_is_noticed_by_its_answer() -> None:
    def gone(_line: str) -> None:
        raise BrokenPipeError

    pipe: Any = SimpleNamespace(write=gone, flush=lambda: None, close=lambda: gone(""))
    process: Any = SimpleNamespace(stdin=pipe, stdout=iter(()), wait=lambda: 1)
    with pytest.raises(TrainingError, match="exit status 1"):
        pool._tokenise(process, Shard("000000-a", (), 10), lambda _count: None)
    closed: list[Path] = []
    process.stdout = SimpleNamespace(close=lambda: closed.append(Path("stdout")))
    pool._close(process)
    assert closed == [Path("stdout")]


def test_malformed_records_have_numbers_too() -> None:
    rejected: list[str] = []
    numbering, file = Numbering(lambda _place, problem: rejected.append(problem)), SourceFile("a.jsonl", "jsonl")

    def records() -> Iterator[str]:
        yield "a"
        numbering.reject(Place(file, 2), "is bad")
        numbering.reject(Place(file, 3), "is worse")
        yield "b"

    assert list(numbering.of(records())) == [(0, "a"), (3, "b")]
    assert list(numbering.of("c")) == [(4, "c")]
    assert rejected == ["is bad", "is worse"]
