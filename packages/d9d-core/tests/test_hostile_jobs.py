"""Job files that were made to harm: one error that names the file, soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from d9d_core.config.document import Document
from d9d_core.config.pretrained import read_config_json
from d9d_core.errors import CheckpointError, JobError


def test_a_job_file_that_is_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to("/dev/zero")
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: it is a device"):
        Document.read(tmp_path / "job.yaml")


def test_a_job_file_that_is_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: it is a named pipe"):
        Document.read(tmp_path / "job.yaml")


def test_a_huge_job_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "job.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: it has more than 1,048,576 bytes"):
        Document.read(tmp_path / "job.yaml")


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"a": "\\udc00"}', b'{"a": 1' + b"0" * 400 + b"}", b"\xff"])
def test_a_config_of_a_model_that_would_fail_later_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="its config.json is damaged"):
        read_config_json(str(tmp_path))
