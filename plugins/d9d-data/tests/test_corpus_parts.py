"""Parts of preparing a corpus: files, facts, splits, and work of several processes."""

from __future__ import annotations

import errno
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.config import (
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    TextConfig,
)
from d9d_data.corpus import cache, prepare, tokenise, work, worker
from d9d_data.corpus.encoding import Encoding
from d9d_data.corpus.fit import Limit, Tally, Words
from d9d_data.corpus.plan import Shard
from d9d_data.sources.document import Piece
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import refuse
from d9d_weights.files.lock import LocksUnsupportedError

GIVEN: Any = {"sources": ("a.jsonl",), "sequence_length": 8}


# --- files and facts of a corpus


def test_stop_tokens_are_ordered_by_frequency_then_by_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which records have them."""
    made = SimpleNamespace(
        save=lambda _to: None, vocab_size=9, description="d", adds_end=True, adds_after=2,
        id_of={"<a>": 1, "<b>": 2, "<c>": 3, "<d>": 4}.get,
    )  # fmt: skip
    setup = SimpleNamespace(make_encoder=lambda: ("the encoder", made))
    monkeypatch.setattr(tokenise, "_train_tokenizer", lambda *_: None)
    monkeypatch.setattr(tokenise, "_tokenise_shards", lambda *_: None)
    monkeypatch.setattr(tokenise, "Setup", SimpleNamespace(of=lambda _config, _work: setup))
    stops = {"<c>": 1, "<b>": 5, "<d>": 7, "<a>": 5}
    monkeypatch.setattr(tokenise, "_join", lambda *_: {"tally": {"stops": stops}})
    facts = tokenise.tokenise(TextConfig(**GIVEN), [], tmp_path, tmp_path)
    assert facts["stop_token_ids"] == [4, 1, 2, 3]
    assert facts == json.loads((tmp_path / "facts.json").read_text())
    del facts["tally"]
    assert facts == {
        "vocab_size": 9, "tokenizer": "d", "adds_end": True, "adds_after": 2, "stop_token_ids": [4, 1, 2, 3],
    }  # fmt: skip


def test_every_tenth_document_is_held_out_and_not_read_by_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for held_out, expected in ((0.0, []), (0.25, [3, 7]), (0.3, [3, 6, 9]), (0.5, [1, 3, 5, 7, 9])):
        aside = tokenise._set_aside(np.arange(10), held_out)
        assert np.flatnonzero(aside).tolist() == expected
        texts = [text for number in range(10) for text in (f"{number}", " ")]
        monkeypatch.setattr(tokenise, "texts_of", lambda piece, _reject, texts=texts: texts[piece : piece + 5])
        shards: Any = [SimpleNamespace(pieces=[0, 5]), SimpleNamespace(pieces=[10, 15])]
        read = list(tokenise._training_texts(shards, held_out, refuse, empty=False))
        assert read == [f"{number}" for number in range(10) if number not in expected]
        aside = tokenise._set_aside(np.arange(0, 20, 2), held_out)  # the number of an empty text is held out too
        read = list(tokenise._training_texts(shards, held_out, refuse, empty=True))
        assert read == [f"{number}" for number in range(10) if not aside[number]]


def test_the_entropy_of_a_table_is_that_of_its_shares() -> None:
    for counts, entropy in (
        ([1, 1], math.log(2)),
        ([4], 0.0),
        ([3, 0, 1], 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
    ):
        assert tokenise.unigram_entropy(np.asarray(counts)) == pytest.approx(entropy)


def test_chunks_hold_so_many_tokens_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(*lengths: int) -> list[tuple[int, int, list[int]]]:
        found = tokenise._chunks(np.asarray(lengths, dtype=np.int64))
        return [(place.start, place.stop, some.tolist()) for place, some in found]

    monkeypatch.setattr(tokenise, "_CHUNK_TOKENS", 5)
    monkeypatch.setattr(tokenise, "_CHUNK_DOCUMENTS", 3)
    assert chunks(2, 3, 1, 9, 1, 4) == [(0, 5, [2, 3]), (5, 6, [1]), (6, 15, [9]), (15, 20, [1, 4])]
    assert chunks(1, 1, 1, 1) == [(0, 3, [1, 1, 1]), (3, 4, [1])]
    assert chunks() == []
    assert chunks(6, 5) == [(0, 6, [6]), (6, 11, [5])]


@pytest.mark.parametrize(
    ("train", "held", "share", "skipped", "dropped", "says"),
    [
        (1, 0, 0.0, 3, 2, None), (3, 1, 0.25, 0, 2, None),
        (0, 0, 0.0, 1200, 0, "no record of its 2 files can be used; 1,200 are malformed, the first .*: it is bad$"),
        (0, 0, 0.5, 0, 0, "the corpus is empty: none of its 2 files holds text; name other sources$"),
        (3, 0, 0.25, 0, 0, "^data.held_out: 0.25 of 3 documents is less than one, so the held_out split is empty"),
        (3, 0, 0.25, 1, 0, "^data.held_out: of 4 records, 1 are malformed or too long, .* in the held_out split; set"),
        (0, 1, 0.5, 0, 2, "^data.held_out: of 3 records, 2 are malformed or too long, .* in the train split; set anot"),
    ],
)  # fmt: skip
def test_splits_without_a_document_are_refused(
    train: int, held: int, share: float, skipped: int, dropped: int, says: str | None
) -> None:
    def check() -> None:
        tokenise._check_splits({"train": train, "held_out": held}, share, 2, skipped, "it is bad", dropped)

    if says is None:
        check()
    else:
        with pytest.raises(DataError, match=says):
            check()


@pytest.mark.parametrize(
    ("wanted", "shards", "here", "workers"),
    [(0, 3, True, 0), (2, 1, True, 1), (2, 3, False, 2), (9, 3, False, 3), (None, 3, False, 3), (None, 9, False, 4)],
)
def test_several_shards_are_tokenised_by_processes(
    wanted: int | None, shards: int, here: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(tokenise, "default_workers", lambda: 4)
    monkeypatch.setattr(tokenise, "write_shard", lambda *given: done.append(given[:4]))
    monkeypatch.setattr(tokenise, "tokenise_in_processes", lambda *given: done.append(given[:3]))
    setup: Any = SimpleNamespace(malformed="skip")
    encoder: Any = "encoder"
    made: Any = [Shard(f"{number}", (), 1) for number in range(shards)]
    tokenise._tokenise_shards(wanted, setup, encoder, made, tmp_path)
    assert done == ([(encoder, shard, "skip", tmp_path) for shard in made] if here else [(setup, made, workers)])
    done.clear()
    memory = [Shard("m", (Piece(SourceFile("memory://a", "text")),), 1), *made]
    tokenise._tokenise_shards(9, setup, encoder, memory, tmp_path)
    assert len(done) == len(memory)


def test_lines_about_a_corpus_count_what_is_left_out_and_learned() -> None:
    def lines(tally: Tally, encoder: str = "chat", weights: Any = None, limit: Limit | None = None, **more: Any) -> Any:
        corpus = prepare.Corpus(
            np.arange(4), np.asarray([0, 4]), 9, "t", 1.0, "d", None, weights=weights, tally=tally, limit=limit,
            encoding=Encoding(encoder, {}, words=Words("records")), **more,
        )  # fmt: skip
        config: Any = SimpleNamespace(special_tokens="token")
        return [line.partition(" of")[0] for line in prepare._lines(corpus, config)]

    some: Any = np.ones(4, dtype=np.bool_)
    assert lines(Tally(records=2)) == []
    assert lines(Tally(records=2), skipped=1234, first_skipped="it is bad") == [
        "left out 1,234 malformed records; the first: it is bad"
    ]
    assert lines(Tally(records=2, cut=1), limit=Limit(3)) == ["warning: cut 1"]
    assert lines(Tally(records=2, cut=1)) == []
    assert lines(Tally(records=2), weights=some) == ["warning: stop token learned in 0"]
    assert lines(Tally(records=2), "tokens", some) == []
    assert lines(Tally(records=2, stops={"<s>": 2}), "tokens", some) == ["stop token learned in 2"]
    assert lines(Tally(records=2, spelled=1, spelling="<s>")) == ["1"]


def test_one_pass_reads_as_much_of_a_document_as_fits_in_a_sample() -> None:
    best: Any = TextConfig(**GIVEN, packing="best_fit")
    assert prepare._read_limit(best, True) == Limit(9)
    assert prepare._read_limit(best, False) is None
    assert prepare._read_limit(TextConfig(**GIVEN), True) is None
    assert prepare._read_limit(DocumentsConfig(**GIVEN, too_long="drop"), True) == Limit(9, "drop")


def test_the_field_of_texts_is_known_for_documents_in_json_lines_only() -> None:
    lines, table = SourceFile("a.jsonl", "jsonl"), SourceFile("a.csv", "csv")
    cases: list[tuple[Any, SourceFile, str | None]] = [
        (DocumentsConfig(**GIVEN), lines, "text"), (DocumentsConfig(**GIVEN), table, None),
        (DocumentsConfig(**GIVEN, field="t"), table, "t"), (TextConfig(**GIVEN), lines, None),
        (TextConfig(**GIVEN, field="t"), lines, "t"), (TextConfig(**GIVEN, field="t"), SourceFile("a", "text"), None),
        (ChatConfig(**GIVEN), lines, None), (LabelledConfig(**GIVEN), lines, "text"),
        (LabelledConfig(**GIVEN, per="word"), SourceFile("a", "text"), "tokens"),
    ]  # fmt: skip
    for config, file, field in cases:
        assert prepare._field_of(config, file) == field


# --- work of several processes


def test_a_directory_whose_lock_vanishes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter([FileNotFoundError(), FileNotFoundError(), 7])

    def lock(file: Path, _wait: Any) -> int:
        assert file == tmp_path / "key.tmp-work" / "lock"
        assert file.parent.is_dir()
        found = next(attempts)
        if isinstance(found, Exception):
            file.parent.rmdir()
            raise found
        return found

    monkeypatch.setattr(work, "lock_file", lock)
    assert work._hold(tmp_path / "key.tmp-work", print) == (tmp_path / "key.tmp-work", 7)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_unfinished_work_stays_where_another_process_can_continue_it(
    keep: bool, locked: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    if not locked:

        def refuses(file: Path, _wait: Any) -> int:
            file.touch()
            raise LocksUnsupportedError(errno.ENOLCK, "No locks")

        monkeypatch.setattr(work, "lock_file", refuses)

    def run() -> Path:
        with work.work_directory(tmp_path / "cache", "key", keep, notes.append) as directory:
            assert directory.is_dir()
            assert directory.name.startswith("key.tmp-work")
            (directory / "shard").mkdir()
            if fails:
                raise KeyError
        return directory

    if fails:
        with pytest.raises(KeyError):
            run()
    else:
        run()
    left = [path.name for path in (tmp_path / "cache").iterdir()]
    assert left == (["key.tmp-work"] if fails and keep and locked else [])
    assert [note.partition(":")[0] for note in notes] == (
        [] if locked else [f"files in {tmp_path / 'cache'} cannot be locked (No locks)"]
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for attempt in (
        lambda: work.work_directory(tmp_path / "file", "key", True, print).__enter__(),
        lambda: cache.cached_directory(tmp_path / "file", "key", print, print),
    ):
        with pytest.raises(
            DataError, match=r"^cannot prepare data in the cache directory .*file: .*; make it writable"
        ):
            attempt()


def test_a_worker_answers_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    ended: list[int] = []

    class Ends(Exception):
        pass

    class Answers(io.StringIO):
        def write(self, text: str) -> int:
            super().write(text)
            if self.getvalue().count("done") == 2:
                raise Ends
            return len(text)

    def write(encoder: Any, shard: Shard, malformed: str, place: Path, advance: Any) -> None:
        assert (encoder, malformed, place) == ("encoder", "skip", Path("work"))
        if shard.name == "bad":
            raise DataError("it is bad")
        advance(shard.size)

    def make(self: Any) -> Any:
        made.append(1)
        return "encoder", None

    setup = worker.Setup("bytes", None, "t", "text", "skip", "work", "text", {})
    shard = Shard("a", (Piece(SourceFile("a.jsonl", "jsonl"), "text", 3, 9),), 5)
    assert worker.decode_shard(worker.encode_shard(shard)) == shard
    monkeypatch.setattr(worker.Setup, "make_encoder", make)
    monkeypatch.setattr(worker, "write_shard", write)
    monkeypatch.setattr(worker.os, "_exit", ended.append)
    shards = [shard, Shard("bad", (), 1), Shard("b", (), 7)]
    answers = Answers()
    with pytest.raises(Ends):
        worker.serve(io.StringIO(setup.encode() + "".join(map(worker.encode_shard, shards))), answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"read": 5}, {"done": True}, {"error": "it is bad"}, {"read": 7}, {"done": True},
    ]  # fmt: skip
    assert made == [1]
