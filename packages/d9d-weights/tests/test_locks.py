"""Locks between processes and renames, also as network file systems do them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_weights.files import lock
from d9d_weights.files.atomic import move, replacing, sync, write_text
from d9d_weights.files.lock import LocksUnsupportedError, exclusive, is_held, lock_file

HOLD = """
import sys
from pathlib import Path
from d9d_weights.files.lock import exclusive
from d9d_weights.files import lock
with exclusive(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``.lock``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def refusing(number: int) -> Any:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_lock_goes_with_a_killed_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    lock = tmp_path / ".lock"
    assert is_held(lock)
    with pytest.raises(CheckpointError, match=rf"busy \(process {holder.pid}\)"), exclusive(lock, "busy"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(lock)
    with exclusive(lock, "busy"):
        assert is_held(lock)
    assert not is_held(lock)


def test_the_holder_on_another_machine_is_named_and_asked_for_by_its_lock_only(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    lock = tmp_path / ".lock"
    lock.write_text("999999999\nanother-machine\n")  # no such process here
    assert is_held(lock)
    with pytest.raises(CheckpointError, match=r"process 999999999 on another-machine"), exclusive(lock, "busy"):
        pass
    holder.kill()
    holder.wait()
    assert not is_held(lock)


def test_contention_may_be_reported_as_missing_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EACCES))
    with pytest.raises(CheckpointError, match="busy"), exclusive(tmp_path / ".lock", "busy"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_a_run_goes_on_after_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with exclusive(tmp_path / ".lock", "busy"):
        write_text(tmp_path / "a", "text")
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}: this file system does not support locks ({os.strerror(number)});")
    assert said.count("\n") == 1
    with pytest.raises(LocksUnsupportedError):
        lock_file(tmp_path / ".lock")


def test_other_failures_of_a_lock_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), exclusive(tmp_path / ".lock", "busy"):
        pass


def test_who_waited_for_a_lock_file_that_was_removed_locks_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, flock, removed = tmp_path / ".lock", fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not removed:
            removed.append(lock)
            lock.unlink()

    monkeypatch.setattr(fcntl, "flock", remove_first)
    descriptor = lock_file(lock)
    assert os.fstat(descriptor).st_ino == lock.stat().st_ino
    os.close(descriptor)


def test_a_rename_whose_answer_was_lost_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def repeated(source: Path, target: Path) -> Path:
        rename(source, target)
        return rename(source, target)  # as an NFS client does

    monkeypatch.setattr(Path, "rename", repeated)
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_rename_of_what_is_not_there_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanishing(source: Path, target: Path) -> Path:
        source.unlink()
        raise FileNotFoundError(errno.ENOENT, "gone", str(source))

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(Path, "rename", vanishing)
    for target in ("a", "b"):
        (tmp_path / "new").write_text("new")
        with pytest.raises(FileNotFoundError):
            move(tmp_path / "new", tmp_path / target)


def test_a_directory_that_cannot_be_synced_is_no_failure_and_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "a")
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "a") as temporary:
        temporary.write_text("ne\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_attempts_to_take_a_held_lock_are_apart_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def held(_descriptor: int, _operation: int) -> None:
        raise BlockingIOError(errno.EAGAIN, "held")

    monkeypatch.setattr(lock.fcntl, "flock", held)
    monkeypatch.setattr(lock.time, "sleep", slept.append)
    with (tmp_path / "lock").open("w") as file, pytest.raises(BlockingIOError):
        lock._take(file.fileno(), tmp_path / "lock", None)
    assert slept == [lock._PAUSE] * (lock._ATTEMPTS - 1)


def test_a_process_that_may_wait_says_so_and_then_takes_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    def flock(_descriptor: int, operation: int) -> None:
        happened.append(operation)
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, "held")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock.time, "sleep", lambda _seconds: None)
    os.close(lock_file(tmp_path / "lock", lambda: happened.append("waiting")))
    assert happened == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 4 + ["waiting", fcntl.LOCK_EX]


def test_a_lock_file_needs_its_directory_and_is_no_link(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "none" / "lock")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link is a symbolic link, not a regular file; remove it"):
        lock_file(tmp_path / "link")
    (tmp_path / "one").touch()
    os.link(tmp_path / "one", tmp_path / "two")
    with pytest.raises(CheckpointError, match="two is a link or not a regular file; remove it"):
        lock_file(tmp_path / "two")
