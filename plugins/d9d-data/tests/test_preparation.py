"""Preparation in shards: the same result for any number of processes, and after any number of kills."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError, TrainingError
from d9d_data.config import DocumentsConfig
from d9d_data.corpus import plan, pool, prepare
from d9d_data.corpus.plan import plan_shards
from d9d_data.corpus.prepare import Corpus
from d9d_data.corpus.tokenise import _chunks
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.opening import SourceFile

SHARD = 3000
WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "away", "é", "from", "it", "all"]


def text(number: int) -> str:
    return " " if number % 11 == 5 else " ".join(WORDS[(number * 5 + place) % 14] for place in range(number % 9 + 1))


@pytest.fixture
def mixed(tmp_path: Path) -> list[str]:
    """Sources of a corpus of twenty shards and more: JSON lines in one large and one small file, and texts."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, count in (("large", 900), ("small", 9)):
        lines = (json.dumps({"text": f"{number} {text(number)}", "id": number}) for number in range(count))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for number in range(50):
        (folder / f"text{number:02}.txt").write_text(text(number) * 3)
    return [str(folder), str(folder / "small.jsonl"), "python:topics"]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", SHARD)


def preparation(sources: list[str], cache: Path, notes: list[str] | None = None, **values: Any) -> Corpus:
    config = DocumentsConfig.model_validate(
        {"sources": sources, "sequence_length": 16, "held_out": 0.07, "preparation_workers": 0} | values
    )
    return prepare.prepare(config, cache, (notes if notes is not None else []).append)


def files_of(cache: Path) -> dict[str, bytes]:
    (entry,) = cache.iterdir()
    return {str(path.relative_to(entry)): path.read_bytes() for path in entry.rglob("*") if path.is_file()}


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_shards_and_workers_have_no_say_in_the_result(
    mixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    preparation(mixed, tmp_path / "whole", tokenizer=tokenizer)
    expected = files_of(tmp_path / "whole")
    for shard_bytes, workers in ((SHARD, 0), (SHARD * 7, 2), (SHARD * 30, None)):
        monkeypatch.setattr(plan, "SHARD_BYTES", shard_bytes)
        cache = tmp_path / f"{shard_bytes} {workers}"
        preparation(mixed, cache, tokenizer=tokenizer, preparation_workers=workers)
        assert files_of(cache) == expected


@pytest.mark.full
@pytest.mark.parametrize("malformed", ["error", "skip"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("small_shards")
def test_malformed_lines_are_those_of_the_file_in_every_shard(tmp_path: Path, malformed: str, workers: int) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(600)]
    for number in (250, 251, 400, 590):
        lines[number] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    values = {"malformed": malformed, "preparation_workers": workers}
    if malformed == "error":
        with pytest.raises(DataError, match=r"^data\.sources: .*a\.jsonl:251 is not JSON"):
            preparation([str(tmp_path / "a.jsonl")], tmp_path / "cache", **values)
        return
    notes: list[str] = []
    corpus = preparation([str(tmp_path / "a.jsonl")], tmp_path / "cache", notes, **values)
    assert corpus.skipped == 4
    assert any("left out 4 malformed documents; the first: " in note and "a.jsonl, line " in note for note in notes)


# --- plans


@pytest.mark.parametrize("limit", [1, 50, 1000, 10**9])
def test_shards_have_every_document_once_and_in_order(mixed: list[str], limit: int) -> None:
    names = [path for path in sorted(Path(mixed[0]).iterdir()) if path.name != "large.jsonl"]
    pieces = [Piece(SourceFile.of(path), "text" if path.suffix == ".jsonl" else None) for path in names]
    expected = [document for piece in pieces for document in texts_of(piece)]
    shards = plan_shards(pieces, limit)
    assert [document for shard in shards for piece in shard.pieces for document in texts_of(piece)] == expected
    assert all(shard.size >= limit for shard in shards[:-1])
    assert len({shard.name for shard in shards}) == len(shards)
    assert sum(shard.size for shard in shards) == sum(path.stat().st_size for path in names)


def test_parquet_files_are_cut_between_row_groups(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {number}" for number in range(1000)]
    parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=100)
    shards = plan_shards([Piece(SourceFile.of(tmp_path / "a.parquet"), "text")], 2000)
    ranges = [(piece.begin, piece.end) for shard in shards for piece in shard.pieces]
    assert len(ranges) > 2
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert [document for shard in shards for piece in shard.pieces for document in texts_of(piece)] == rows
    parquet.write_table(pa.table({"text": [*rows[:-1], None]}), tmp_path / "a.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"a\.parquet row 1000 has no text"):
        list(texts_of(shards[-1].pieces[-1]))


def test_shards_are_named_without_the_paths_of_their_files(mixed: list[str], tmp_path: Path) -> None:
    moved = Path(mixed[0]).rename(tmp_path / "moved")
    moved.with_name("mixed").symlink_to(moved)
    plans = [plan_shards([Piece(SourceFile.of(folder / "large.jsonl"), "text")], SHARD) for folder in
             (moved, moved.with_name("mixed"))]  # fmt: skip
    assert [shard.name for shard in plans[0]] == [shard.name for shard in plans[1]]


def test_chunks_hold_whole_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr("d9d_data.corpus.tokenise._CHUNK_TOKENS", 10)
    lengths = np.asarray([3, 7, 1, 25, 9, 1, 1])
    for most, expected in ((7, [[3, 7], [1], [25], [9, 1], [1]]), (4, [[3, 7], [1], [25], [9, 1], [1]])):
        monkeypatch.setattr("d9d_data.corpus.tokenise._CHUNK_DOCUMENTS", most)
        chunks = list(_chunks(lengths))
        assert [sizes.tolist() for _, sizes in chunks] == expected
        assert np.concatenate([np.arange(47)[place] for place, _ in chunks]).tolist() == list(range(47))
    monkeypatch.setattr("d9d_data.corpus.tokenise._CHUNK_DOCUMENTS", 1)
    assert [sizes.tolist() for _, sizes in _chunks(lengths)] == [[n] for n in lengths]


# --- kills

SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
from d9d_data.config import DocumentsConfig
from d9d_data.corpus import plan, prepare

plan.SHARD_BYTES = int(sys.argv[3])
sources, cache, die_after = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])

def finished():
    return [path for path in cache.glob("*.tmp-work/[0-9]*-*") if ".tmp-" not in path.name]

def watch():
    while len(finished()) < die_after:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if die_after:
    threading.Thread(target=watch, daemon=True).start()
config = DocumentsConfig(sources=sources, sequence_length=16, held_out=0.07, tokenizer=json.loads(sys.argv[6]),
                         preparation_workers=int(sys.argv[5]))
prepare.prepare(config, cache, lambda text: print(text, flush=True))
"""


def start(sources: list[str], cache: Path, die_after: int = 0, workers: int = 0, tokenizer: Any = "bytes") -> Any:
    """A script without ``if __name__ == "__main__"``."""
    arguments = [json.dumps(sources), str(cache), str(SHARD), str(die_after), str(workers), json.dumps(tokenizer)]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
@pytest.mark.parametrize(("workers", "tokenizer"), [(0, {"bpe": 300}), (2, "bytes")])
def test_a_start_after_a_kill_goes_on_with_what_is_finished(
    mixed: list[str], tmp_path: Path, workers: int, tokenizer: Any
) -> None:
    preparation(mixed, tmp_path / "whole", tokenizer=tokenizer)
    cache = tmp_path / "cache"
    for die_after in (1, 3):
        process = start(mixed, cache, die_after, workers, tokenizer)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, errors
    finished = {path: path.stat().st_mtime_ns for path in cache.glob("*.tmp-work/[0-9]*") if ".tmp-" not in path.name}
    assert len(finished) >= 3
    (directory,) = cache.glob("*.tmp-work")
    old = time.time() - 3 * 24 * 3600
    os.utime(directory, (old, old))  # of a job that waited for its machine for days
    process = start(mixed, cache, 0, workers, tokenizer)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    told = [int(line.split()[1]) for line in output.splitlines() if "shards from an interrupted start" in line]
    assert told
    assert told[0] >= len(finished)
    for left in cache.glob("*.tmp-*"):  # unfinished files of the killed processes, for the next sweep
        assert not left.name.endswith("tmp-work")
        os.utime(left, (old, old))
    entry = next(path for path in cache.iterdir() if ".tmp-" not in path.name)
    whole = next((tmp_path / "whole").iterdir())
    for path in whole.rglob("*"):
        assert path.is_dir() or (entry / path.relative_to(whole)).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("small_shards")
def test_finished_shards_are_not_made_again(mixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    begun: list[str] = []

    def stop_at(count: int) -> Callable[..., None]:
        from d9d_data.corpus.shards import write_shard

        def write(tokenizer: Any, shard: Any, *rest: Any) -> None:
            if len(begun) == count:
                raise KeyboardInterrupt
            begun.append(shard.name)
            write_shard(tokenizer, shard, *rest)

        return write

    monkeypatch.setattr("d9d_data.corpus.tokenise.write_shard", stop_at(4))
    with pytest.raises(KeyboardInterrupt):
        preparation(mixed, cache)
    (left,) = cache.iterdir()
    times = {path.name: path.stat().st_mtime_ns for path in left.iterdir() if path.is_dir()}
    assert sorted(times) == begun
    monkeypatch.setattr("d9d_data.corpus.tokenise.write_shard", stop_at(4 + 3))
    with pytest.raises(KeyboardInterrupt):
        preparation(mixed, cache)
    assert {
        path.name: path.stat().st_mtime_ns for path in left.iterdir() if path.is_dir()
    } == times  # the same three came first
    monkeypatch.undo()


@pytest.mark.thorough
@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_made_again(mixed: list[str], tmp_path: Path) -> None:
    preparation(mixed, tmp_path / "whole")
    cache = tmp_path / "cache"
    process = start(mixed, cache, 2)
    process.communicate(timeout=60)
    for tokens in cache.glob("*.tmp-work/*/tokens.npy"):
        tokens.write_bytes(b"damaged" * 999)
    preparation(mixed, cache)
    entry = next(path for path in cache.iterdir() if ".tmp-" not in path.name)
    for name, content in files_of(tmp_path / "whole").items():
        assert (entry / name).read_bytes() == content


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Worker processes, of which the one that is given the fifth shard is killed."""
    processes: list[Any] = []
    send, started = pool._send, pool._start
    sent = itertools.count(1)

    def starting(workers: int) -> Any:
        processes.append(started(workers))
        return processes[-1]

    def sending(process: Any, line: str) -> None:
        if next(sent) == 2 + 5:  # two setups, and shards
            process.kill()
            process.wait()
        send(process, line)

    monkeypatch.setattr(pool, "_start", starting)
    monkeypatch.setattr(pool, "_send", sending)
    yield processes
    assert all(process.poll() is not None for process in processes)


@pytest.mark.thorough
@pytest.mark.usefixtures("small_shards")
def test_a_worker_that_dies_ends_the_start_and_the_next_goes_on(
    mixed: list[str], tmp_path: Path, dying: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingError, match=r"^data\.preparation_workers: a tokenising process died \(exit status -9"):
        preparation(mixed, tmp_path / "cache", preparation_workers=2)
    assert len(dying) == 2
    monkeypatch.undo()
    monkeypatch.setattr(plan, "SHARD_BYTES", SHARD)
    notes: list[str] = []
    after = preparation(mixed, tmp_path / "cache", notes, preparation_workers=0)
    assert any("shards from an interrupted start" in note for note in notes)
    assert after.digest == preparation(mixed, tmp_path / "whole").digest


def test_workers_end_with_the_process_that_started_them() -> None:
    process = pool._start(1)
    assert process.stdin is not None
    process.stdin.write(
        json.dumps(
            {
                "tokenizer": "bytes",
                "end_of_text": None,
                "tokenizer_directory": "",
                "special_tokens": "text",
                "malformed": "error",
                "work": "",
                "encoder": "text",
                "settings": {},
            }
        )
    )
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert process.stdout is not None
    process.stdout.close()


# --- several processes


@pytest.mark.full
def test_processes_that_prepare_the_same_wait_for_one_of_them(mixed: list[str], tmp_path: Path) -> None:
    processes = [start(mixed, tmp_path / "cache") for _ in range(3)]
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        outputs.append(output)
    assert sum("preparing" in output for output in outputs) == 1
    preparation(mixed, tmp_path / "whole")
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_where_files_cannot_be_locked_a_process_works_alone(
    mixed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    notes: list[str] = []
    preparation(mixed, tmp_path / "cache", notes)
    assert any("cannot be locked (Operation not supported)" in note for note in notes)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.usefixtures("small_shards")
def test_a_change_while_shards_are_made_leaves_none_of_them(mixed: list[str], tmp_path: Path) -> None:
    class Changing(list[str]):
        def append(self, note: str) -> None:
            if "preparing" in note:
                (Path(mixed[0]) / "text00.txt").write_text("changed")

    with pytest.raises(DataError, match="a file changed while it was being read"):
        preparation(mixed, tmp_path / "cache", Changing())
    assert list((tmp_path / "cache").iterdir()) == []


def test_documents_are_set_aside_as_they_always_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_data.corpus.tokenise._CHUNK_TOKENS", 1000)  # chunks do not start again at zero
    rows = [f"document {number}" for number in range(997)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for held_out in (0.01, 0.07, 1 / 3, 0.5):
        aside = [row for index, row in enumerate(rows) if int((index + 1) * held_out) > int(index * held_out)]
        corpus = preparation([str(tmp_path / "a.jsonl")], tmp_path / "cache", held_out=held_out, split="held_out")
        tokens, starts = corpus.tokens.tolist(), corpus.starts.tolist()
        assert [bytes(tokens[a : b - 1]).decode() for a, b in itertools.pairwise(starts)] == aside


@pytest.mark.parametrize(
    ("held_out", "digests"),
    [
        (0.0, ["8aafaad9e1edebe1"]),
        (0.03, ["ad74f0e325a11717", "aeaf79575e675860"]),
        (0.25, ["3c425b8da3ba963f", "4e6d58e3c7616dff"]),
    ],
)
@pytest.mark.usefixtures("small_shards")
def test_checkpoints_of_earlier_versions_belong_to_the_same_data(
    tmp_path: Path, held_out: float, digests: list[str]
) -> None:
    """The digests were taken before there were shards."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    words += ["and", "runs", "away", "from", "it", "all"]
    (tmp_path / "texts").mkdir()
    for i in range(60):
        document = " ".join(words[(i * 3 + j) % 15] for j in range(20 + i)) + " — é\n"
        (tmp_path / "texts" / f"{i:02}.txt").write_text(" \n" if i % 7 == 3 else document, encoding="utf-8")
    lines = []
    for i in range(300):
        document = "  " if i % 11 == 5 else f"{i} " + " ".join(words[(i * 5 + j) % 15] for j in range(i % 9))
        lines.append(json.dumps({"text": document, "id": i}, ensure_ascii=i % 2 == 0) + "\n")
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    sources = [str(tmp_path / "texts"), str(tmp_path / "lines.jsonl")]
    splits = ["train", "held_out"][: len(digests)]
    corpora = [preparation(sources, tmp_path / "cache", held_out=held_out, split=split) for split in splits]
    assert [corpus.digest[:16] for corpus in corpora] == digests
