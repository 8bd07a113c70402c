"""Model directories and headers that were made to harm: errors of ours, soon, and nothing else is read."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.files.safetensors import TensorFile, write_tensors
from d9d_weights.hugging_face.directory import ModelDirectory


def model(directory: Path) -> Path:
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        write_tensors(file, {"a": torch.arange(4.0)})
    (directory / "config.json").write_text("{}")
    return directory


def header(entries: dict[str, Any] | str, data: bytes = b"") -> TensorFile:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return TensorFile(io.BytesIO(len(text).to_bytes(8, "little") + text + data), "x")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [[10**299] * 100_000, [1] * 65, [0, 2**62, 4], [2**63, 0], [True, 4], [10**400]],
    ids=["endless product", "dimensions", "strides", "size", "bool", "digits"],
)
def test_sizes_that_no_tensor_has_are_refused(shape: list[int]) -> None:
    with pytest.raises(CheckpointError, match="x is damaged: its header is unreadable"):
        header({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16 if True in shape else 0]}}, bytes(16))


@pytest.mark.parametrize(
    "text",
    [
        '{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        "[" * 10**5,
        '{"a": NaN}',
        '{"__metadata__": 1e999}',
    ],
)
def test_headers_that_are_no_plain_json_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="x is damaged: its header is unreadable"):
        header(text)


def test_a_header_of_many_equal_names_is_refused_at_once() -> None:
    names = ",".join(f'"{n}":0' for n in (*range(200_000), 199_999))
    with pytest.raises(CheckpointError, match="'199999' appears twice"):
        header("{" + names + "}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_file_of_a_model_that_is_a_device_or_a_pipe_is_not_read(tmp_path: Path, name: str, target: str) -> None:
    directory = model(tmp_path / "model")
    (directory / name).unlink()
    if target == "pipe":
        os.mkfifo(directory / name)
    else:
        (directory / name).symlink_to(target)
    with pytest.raises(
        CheckpointError,
        match="the path leads to a (device|named pipe)|the file is a symbolic link|has no .safetensors file",
    ):
        ModelDirectory.open(directory).config()


def test_files_may_be_links_as_the_cache_of_the_hub_has_them(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    (directory / "model.safetensors").rename(tmp_path / "blob")
    (directory / "model.safetensors").symlink_to("../blob")
    with ModelDirectory.open(directory) as opened:
        into = torch.zeros(4)
        opened.read("a", [0], into)
    assert into.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_files_that_lead_outside_are_not_read_so_no_export_copies_them(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path / "model")
    (tmp_path / "secret").write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("../secret")
    if "index" in name:
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    with pytest.raises(
        CheckpointError, match=f"{name} cannot be read: .*the file is a symbolic link to another directory"
    ):
        ModelDirectory.open(directory).read_file(name)


@pytest.mark.thorough
def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    with (directory / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="the limit for such files"):
        ModelDirectory.open(directory).config()


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"a": "\\ud800"}', b'{"a": 1' + b"0" * 4000 + b"}"])
def test_a_config_that_would_fail_later_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = model(tmp_path / "model")
    (directory / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        ModelDirectory.open(directory).config()
