from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from d9d_core.errors import DataError
from d9d_data.corpus import work
from d9d_data.corpus.cache import MANIFEST, cached_directory, find_damage
from d9d_data.corpus.work import work_directory
from d9d_weights.files.lock import LocksUnsupportedError

SCRIPT = """
import sys, time
from pathlib import Path
from d9d_data.corpus.cache import cached_directory

def build(directory):
    (directory / "a").write_text("content")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (directory / "sub").mkdir()
    (directory / "sub" / "b").write_text("more")

print(cached_directory(Path(sys.argv[1]), "key", build, print))
"""


def build(directory: Path) -> None:
    (directory / "a").write_text("content")
    (directory / "sub").mkdir()
    (directory / "sub" / "b").write_text("more")


def ensure(root: Path, notes: list[str] | None = None) -> Path:
    return cached_directory(root, "key", build, (notes if notes is not None else []).append)


def start(root: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(root), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_second_call_does_not_build(tmp_path: Path) -> None:
    ensure(tmp_path)

    def refuse(_directory: Path) -> None:
        raise AssertionError("built again")

    assert (cached_directory(tmp_path, "key", refuse, print) / "a").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("place", "found"), [(0, True), (-1, True), ((1 << 20) // 5 + 100, True), ((1 << 20) // 10, False)]
)
def test_a_start_finds_damage_in_the_sampled_blocks_of_a_large_file_and_a_full_check_all(
    tmp_path: Path, place: int, found: bool
) -> None:
    content = bytearray(1 << 20)

    def large(directory: Path) -> None:
        (directory / "a").write_bytes(content)

    target = cached_directory(tmp_path, "key", large, print)
    assert find_damage(target, full=True) is None
    content[place] ^= 1
    (target / "a").write_bytes(content)
    assert (find_damage(target) is not None) == found
    assert find_damage(target, full=True) == "a has a different checksum than when it was written"
    (target / "a").write_bytes(content[:-1])
    assert find_damage(target) == "a has 1,048,575 bytes, not the 1,048,576 that were written"


def test_a_check_reads_no_more_of_a_larger_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse(directory: Path) -> None:
        with (directory / "a").open("wb") as file:
            file.truncate(1 << 24)

    target = cached_directory(tmp_path, "key", sparse, print)
    monkeypatch.setattr("d9d_data.corpus.cache._sha256", lambda path: pytest.fail(f"read all of {path}"))
    assert find_damage(target) is None


@pytest.mark.parametrize("manifest", ["[]", '{"a": "x"}', '{"a": {"size": "1", "sha256": "x", "sample": "x"}}'])
def test_a_manifest_of_another_form_is_damage(tmp_path: Path, manifest: str) -> None:
    target = ensure(tmp_path)
    (target / MANIFEST).write_text(manifest)
    assert find_damage(target) == f"ValueError: {MANIFEST} of the prepared data is not a table of sizes and checksums"


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest", "empty"])
def test_damage_is_reported_and_repaired(tmp_path: Path, damage: str) -> None:
    target = ensure(tmp_path)
    if damage == "flip":
        (target / "a").write_text("contenu")
    elif damage == "truncate":
        (target / "a").write_text("cont")
    elif damage == "missing":
        (target / "sub" / "b").unlink()
    elif damage == "manifest":
        (target / MANIFEST).write_text('{"a": ')
    else:
        (target / MANIFEST).unlink()
    notes: list[str] = []
    ensure(tmp_path, notes)
    assert len(notes) == 1
    assert "damaged" in notes[0]
    assert find_damage(target) is None
    assert (target / "a").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        build(directory)
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        cached_directory(tmp_path, "key", fail, print)
    assert list(tmp_path.iterdir()) == []


def test_killed_build_is_never_taken_for_a_finished_one(tmp_path: Path) -> None:
    process = start(tmp_path, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "key").exists()
    left = next(tmp_path.glob("*.tmp-*"))
    assert (ensure(tmp_path) / "sub" / "b").read_text() == "more"
    for hours, stays in ((0, True), (23.9, True), (24.1, False)):  # only a file that is a day old surely has no owner
        changed = time.time() - hours * 3600
        os.utime(left, (changed, changed))
        (tmp_path / "key" / "a").unlink()
        ensure(tmp_path)
        assert left.exists() == stays


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_build_at_once_agree(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        (ensure(tmp_path) / "a").write_text("bad")
    processes = [start(tmp_path, 0.2) for _ in range(3)]
    for process in processes:
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert output.splitlines()[-1] == str(tmp_path / "key")
    assert find_damage(tmp_path / "key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_unusable_cache_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cache directory .*file.*choose another"):
        ensure(tmp_path / "file")


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_unfinished_work_stays_if_a_later_process_can_continue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, keep: bool
) -> None:
    def unsupported(file: Path, _wait: object) -> int:
        file.touch()
        raise LocksUnsupportedError(95, "not supported")

    if not locks:
        monkeypatch.setattr(work, "lock_file", unsupported)
    notes: list[str] = []
    root = tmp_path / "new" / "cache"
    with work_directory(root, "key", keep, notes.append) as directory:
        (directory / "a").write_text("a")
        assert (directory == root / "key.tmp-work") is locks
        assert list(root.iterdir()) == [directory]
    assert list(root.iterdir()) == []
    failed = work_directory(root, "key", keep, notes.append)
    directory = failed.__enter__()
    (directory / "a").write_text("a")
    assert failed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) is False
    assert (directory / "a").exists() is (locks and keep)
    assert list(root.iterdir()) == ([directory] if locks and keep else [])
    without = (
        f"files in {root} cannot be locked (not supported): processes that prepare the same data do not wait for each "
        "other"
    )
    assert notes == ([] if locks else [without] * 2)
    with work_directory(root, "key", keep, notes.append) as again:  # the lock was given back
        assert (again / "a").exists() is (locks and keep)
