"""Rare cases of data: broken texts, addresses that cannot be listed, templates with dates, ends of workers."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.order.layout import Layout
from d9d_data.sources import document, find
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place, Record
from d9d_data.stream import chat, one_pass, reader
from d9d_data.stream.binned import BinSamples
from d9d_data.stream.one_pass import _block_size
from d9d_data.stream.text import TextSamples


def test_a_text_with_half_of_a_surrogate_pair_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SourceFile.of("a.jsonl")
    texts = ("good é", "bad \ud800", "\U0001f600")
    records = [Record({"text": text}, Place(file, number)) for number, text in enumerate(texts, 1)]
    monkeypatch.setattr(document, "read_records", lambda *_: iter(records))
    rejected: list[tuple[str, str]] = []
    found = texts_of(Piece(file, "text"), lambda place, text: rejected.append((place.exact(), text)))
    assert list(found) == ["good é", "\U0001f600"]
    assert rejected == [("a.jsonl:2", "holds half of a surrogate pair in its field 'text'; repair it")]


def test_an_address_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "file_system", lambda source: ("system", source.removeprefix("s3://")))

    def names(system: str, path: str) -> Any:
        assert (system, path) == ("system", "bucket/x")
        raise RuntimeError("no token")

    monkeypatch.setattr(find, "_remote_names", names)
    with pytest.raises(DataError) as error:
        find._remote_files("s3://bucket/x", "data.sources[3]", print)
    assert str(error.value) == (
        "data.sources[3]: cannot list s3://bucket/x: no token; check the address and the credentials"
    )
    monkeypatch.setattr(find, "_remote_names", lambda _system, _path: iter(()))
    with pytest.raises(DataError, match=r"^data.sources\[3\]: no file at s3://bucket/x; check the address$"):
        find._remote_files("s3://bucket/x", "data.sources[3]", print)


def test_packed_samples_all_have_the_length_of_a_sequence() -> None:
    corpus: Any = None
    unused: Any = None
    samples = np.asarray([4, 0, 9])
    assert TextSamples(corpus, 16).sizes(samples).tolist() == [16] * 3
    assert BinSamples(corpus, unused, unused, 8).sizes(samples).tolist() == [8] * 3


@pytest.mark.parametrize(("dated", "lines"), [(None, 0), (False, 0), (True, 1)])
def test_a_template_with_the_date_is_told(dated: bool | None, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    template = None if dated is None else SimpleNamespace(name="t.jinja", depends_on_date=dated)
    asked: list[Any] = []

    def found(file: str, arguments: object) -> Any:
        asked.append((file, arguments))
        return template

    monkeypatch.setattr(chat, "ChatTemplate", SimpleNamespace(find=found))
    monkeypatch.setattr(chat, "find_tokenizer_file", lambda tokenizer, only_files: f"file of {tokenizer} {only_files}")
    config: Any = SimpleNamespace(tokenizer="tok", template_arguments={"a": 1})
    notes: list[str] = []
    chat._warn_of_dates(config, notes.append)
    assert asked == [("file of tok True", {"a": 1})]
    assert notes == [
        "warning: t.jinja renders today's date; prepared data keeps the date of its preparation"
    ][:lines]  # fmt: skip


def test_a_worker_ends_when_its_training_process_asks_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([None, SimpleNamespace(si_pid=7), SimpleNamespace(si_pid=5), None])
    waited: list[Any] = []
    statuses: list[int] = []

    def sigtimedwait(signals: list[int], seconds: float) -> Any:
        waited.append((signals, seconds))
        return next(asked)

    monkeypatch.setattr(reader.signal, "sigtimedwait", sigtimedwait)
    monkeypatch.setattr(os, "getppid", lambda: 5)
    monkeypatch.setattr(os, "_exit", statuses.append)
    reader._end_with_training_process(5)
    assert (waited, statuses) == ([([signal.SIGTERM], 1.0)] * 3, [0])


def test_a_worker_ignores_ctrl_c_and_where_it_cannot_wait_for_signals_sigterm_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[Any] = []

    class Thread:
        def __init__(self, target: object, args: object, daemon: bool) -> None:
            happened.append((target, args, daemon))

        def start(self) -> None:
            happened.append("started")

    monkeypatch.setattr(reader.threading, "Thread", Thread)
    monkeypatch.setattr(reader.signal, "signal", lambda *given: happened.append(given))
    monkeypatch.setattr(reader.signal, "pthread_sigmask", lambda *given: happened.append(given))
    reader._follow_training_process(5, 0)
    ignored = (signal.SIGINT, signal.SIG_IGN)
    assert happened == [ignored, (reader._end_with_training_process, (5,), True), "started"]
    happened.clear()
    monkeypatch.delattr(reader.signal, "sigtimedwait")
    reader._follow_training_process(5, 0)
    assert happened == [ignored, (signal.SIG_UNBLOCK, [signal.SIGTERM])]


def test_more_samples_are_sorted_together_in_larger_batches_and_no_more_than_a_window() -> None:
    def size(batch: int, window: int | None = None) -> int:
        return _block_size(Layout(batch, 2, 0, 1), window)

    block = one_pass._BLOCK
    assert [size(2 * block * count) for count in (1, 2, 4)] == [2, 4, 8]
    assert size(2 * (block - 1)) == 2
    assert [size(2 * block * 4, window) for window in (1, 2, 4, 6, 8)] == [2, 2, 4, 2, 8]
