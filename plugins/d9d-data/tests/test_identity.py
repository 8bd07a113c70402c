"""When prepared data is used again, and how little of a large corpus is read to find out."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from d9d_core.errors import DataError
from d9d_data.corpus import cache, identity
from d9d_data.sources import opening

SAMPLE = cache.SAMPLE_BLOCK * cache.SAMPLE_BLOCKS


class Counter:
    """Opens files, and counts the bytes that are read from them."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.read = 0

    def __call__(self, address: str) -> Any:
        counter = self

        class Counting(io.RawIOBase):
            def __init__(self, file: Any) -> None:
                self._file = file

            def readable(self) -> bool:
                return True

            def seek(self, *args: int) -> int:
                return int(self._file.seek(*args))

            def readinto(self, buffer: Any) -> int:
                data = self._file.read(len(buffer))
                buffer[: len(data)] = data
                counter.read += len(data)
                return len(data)

            def close(self) -> None:
                self._file.close()
                super().close()

        return Counting(self._opened(address))


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus that counts as large: a file of 40 samples, and a small one."""
    monkeypatch.setattr(identity, "SMALL_CORPUS", 10_000)
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "a.txt").write_text("the fox and the dog\n" * (SAMPLE * 2))
    (folder / "b.txt").write_text("short")
    return folder


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counting = Counter(opening._opened)
    monkeypatch.setattr(opening, "_opened", counting)
    return counting


def preparations(open_stream: Any, source: Path | str, **values: Any) -> int:
    notes: list[str] = []
    open_stream(source, note=notes.append, **values)
    return sum("preparing" in note for note in notes)


@pytest.mark.parametrize(("digest", "most"), [("sampled", SAMPLE + 5), ("full", 40 * SAMPLE + 5)])
def test_a_second_start_reads_samples_unless_told_to_read_everything(
    open_stream: Any, large: Path, counter: Counter, digest: str, most: int
) -> None:
    assert preparations(open_stream, large, digest=digest) == 1
    assert counter.read > 40 * SAMPLE
    counter.read = 0
    assert preparations(open_stream, large, digest=digest) == 0
    assert most - 5 <= counter.read <= most


@pytest.mark.thorough
def test_a_changed_time_or_sample_is_another_corpus_only_where_samples_decide(open_stream: Any, large: Path) -> None:
    file = large / "a.txt"
    digests = {}
    for digest in ("sampled", "full"):
        assert preparations(open_stream, large, digest=digest) == 1
        status = file.stat()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert preparations(open_stream, large, digest=digest) == (digest == "sampled")
        digests[digest] = open_stream(large, digest=digest)._corpus.digest
    assert digests["sampled"] == digests["full"]
    status = file.stat()
    with file.open("r+b") as opened:  # the last byte, and no other time
        opened.seek(-1, os.SEEK_END)
        opened.write(b"!")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for digest in ("sampled", "full"):
        assert preparations(open_stream, large, digest=digest) == 1


def test_the_same_files_elsewhere_are_the_same_corpus(open_stream: Any, large: Path, tmp_path: Path) -> None:
    assert preparations(open_stream, large) == 1
    large.rename(tmp_path / "moved")
    assert preparations(open_stream, tmp_path / "moved") == 0


def test_small_corpora_and_small_files_are_recognised_by_their_contents(
    open_stream: Any, large: Path, corpus: Path
) -> None:
    for folder in (corpus, large):
        assert preparations(open_stream, folder) == 1
        for file in folder.iterdir():
            if file.stat().st_size < SAMPLE:
                os.utime(file, ns=(0, 0))
        assert preparations(open_stream, folder) == 0


@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_a_large_file_that_changes_while_it_is_read_is_an_error(
    open_stream: Any, large: Path, tmp_path: Path, digest: str
) -> None:
    def change(text: str) -> None:
        if "preparing" in text:
            with (large / "a.txt").open("r+b") as file:
                file.seek(SAMPLE // 3)
                file.write(b"?")

    with pytest.raises(DataError, match="a file changed while it was being read"):
        open_stream(large, digest=digest, note=change)
    assert list((tmp_path / "cache").iterdir()) == []


def test_how_a_file_is_read_is_part_of_what_it_is(open_stream: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "text one", "b": "text two"}')
    (tmp_path / "a.txt").write_text('{"a": "text one", "b": "text two"}')
    digests = {
        open_stream(tmp_path / name, field=field, sequence_length=4)._corpus.digest
        for name, field in (("a.jsonl", "a"), ("a.jsonl", "b"), ("a.txt", "a"))
    }
    assert len(digests) == 3


def test_a_large_remote_file_is_recognised_by_a_sample(
    open_stream: Any, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "SMALL_CORPUS", 10_000)
    memory = fsspec.filesystem("memory")
    memory.pipe("/large.txt", b"the fox and the dog\n" * SAMPLE)
    try:
        assert preparations(open_stream, "memory://large.txt") == 1
        assert counter.read == 20 * SAMPLE
        assert preparations(open_stream, "memory://large.txt") == 0
        assert counter.read == 20 * SAMPLE
        memory.pipe("/large.txt", b"the fox and the cat\n" * SAMPLE)
        assert preparations(open_stream, "memory://large.txt") == 1
    finally:
        memory.rm("/large.txt")
