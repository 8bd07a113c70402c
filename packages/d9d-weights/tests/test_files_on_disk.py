"""Files and directories that must outlast a crash, and the reasons of those that could not be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from d9d_core.errors import CheckpointError
from d9d_weights.files.atomic import published, write_text
from d9d_weights.sharding.agreement import reason


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes that the operating system was asked to write to the disk, in order."""
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: inodes.append(os.fstat(descriptor).st_ino))
    return inodes


def test_a_published_directory_reaches_the_disk_and_then_its_name_does(tmp_path: Path, synced: list[int]) -> None:
    with published(tmp_path / "a") as directory:
        assert synced == []
        inode = directory.stat().st_ino
    assert synced == [inode, tmp_path.stat().st_ino]


def test_a_replaced_file_reaches_the_disk(tmp_path: Path, synced: list[int]) -> None:
    write_text(tmp_path / "a", "new")
    assert synced == [(tmp_path / "a").stat().st_ino]


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
