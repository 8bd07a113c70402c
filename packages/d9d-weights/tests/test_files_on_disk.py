"""Files and directories that must outlast a crash, and the reasons of those that could not be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from d9d_core.errors import CheckpointError
from d9d_weights.files import remote
from d9d_weights.files.atomic import write_text
from d9d_weights.files.local import LocalDirectory, LocalDraft, LocalStore
from d9d_weights.files.open import open_store
from d9d_weights.sharding.agreement import reason


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes that the operating system was asked to write to the disk, in order."""
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: inodes.append(os.fstat(descriptor).st_ino))
    return inodes


def test_a_published_directory_reaches_the_disk_and_then_its_name_does(tmp_path: Path, synced: list[int]) -> None:
    draft = LocalDraft(tmp_path / "a")
    draft.start()
    assert synced == []
    draft.publish({})
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


def test_whatever_has_the_name_of_a_draft_is_removed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").touch()
    for make in (Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to(secret)):
        make(tmp_path / ".a.tmp")
        LocalDraft(tmp_path / "a").start()
        assert list((tmp_path / ".a.tmp").iterdir()) == []
        (tmp_path / ".a.tmp").rmdir()
    assert list(secret.iterdir()) == [secret / "file"]


def test_a_directory_lists_files_and_a_store_directories(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000002").touch()
    (tmp_path / "model.safetensors").symlink_to("step-00000002")
    assert LocalDirectory(tmp_path).names() == ["model.safetensors", "step-00000002"]
    assert LocalStore(tmp_path).names() == ["step-00000001"]


def test_an_address_that_is_refused_without_a_word_is_refused_with_the_kind_of_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_url: str) -> None:
        raise NotImplementedError

    monkeypatch.setattr(remote, "url_to_fs", refuse)
    with pytest.raises(CheckpointError, match="cannot be stored at odd://x: NotImplementedError; use another address"):
        open_store("odd://x")


def test_a_checkpoint_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "step-00000001").mkdir()
    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        LocalStore(tmp_path).remove("step-00000001")


def test_a_replaced_file_reaches_the_disk(tmp_path: Path, synced: list[int]) -> None:
    write_text(tmp_path / "a", "new")
    assert synced == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CheckpointError("a is\nno model"), "a is no model"),
        (OSError("disk full"), "disk full"),
        (OSError(), "OSError: "),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_a_reason_is_never_empty(error: Exception, text: str) -> None:
    assert reason(error) == text
