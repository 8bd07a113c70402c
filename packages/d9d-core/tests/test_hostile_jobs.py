"""Job files that were made to harm: one error that names the file, soon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fsspec
import pytest
from d9d_core.config import Section
from d9d_core.errors import CheckpointError, JobError
from d9d_core.job import JobFile
from d9d_core.job_file import pretrained
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import Mesh, Timeouts
from d9d_core.job_file.load import _short, plugin_policy
from d9d_core.job_file.pretrained import read_config_json
from d9d_core.job_file.reading import read_yaml
from pydantic import ValidationError


def test_a_job_file_that_is_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to("/dev/zero")
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: the path leads to a device"):
        Document.read(tmp_path / "job.yaml")


def test_a_job_file_that_is_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: the path leads to a named pipe"):
        Document.read(tmp_path / "job.yaml")


def test_a_huge_job_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "job.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(JobError, match=r"job.yaml: cannot be read: the file has more than 1,048,576 bytes"):
        Document.read(tmp_path / "job.yaml")


def test_a_name_that_fills_pages_is_not_repeated() -> None:
    with pytest.raises(JobError) as caught:
        JobFile.from_values({"task": {"name": "y" * 12_000}, "model": "x" * 12_000})
    assert "unknown task 'yyyy" in str(caught.value)
    assert "a name cannot have 12,000 characters" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_yaml_is_nested_at_most_100_levels_and_names_a_key_once() -> None:
    assert str(read_yaml("[" * 100 + "1" + "]" * 100, "job")[0]) == "[" * 100 + "1" + "]" * 100
    with pytest.raises(JobError, match="^job:1: nested more than 100 levels deep$"):
        read_yaml("[" * 101 + "1" + "]" * 101, "job")
    assert read_yaml("a: 1\nb: {a: 2}\n", "job")[0] == {"a": 1, "b": {"a": 2}}
    with pytest.raises(JobError, match="^job:3: "):
        read_yaml("a: 1\nb: 2\na: 3\n", "job")


def test_values_in_messages_have_at_most_200_characters() -> None:
    assert [_short("x" * length) for length in (1, 200, 201)] == ["x", "x" * 200, "x" * 200 + "..."]


def test_a_model_of_the_hub_is_to_be_downloaded_if_no_such_directory_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_config_json("org/name")
    assert str(caught.value) == (
        "there is no such directory; if it is a model of the Hugging Face Hub, download it: hf download org/name "
        "--local-dir name, then set model.pretrained to ./name"
    )
    (tmp_path / "org" / "name").mkdir(parents=True)
    for location in ("org/name", "a/b/c", "name"):
        with pytest.raises(
            CheckpointError, match=r"^the config.json of .* cannot be read \(No such file or directory\); give"
        ):
            read_config_json(location)


def test_a_path_that_no_system_takes_is_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointError, match=r"config.json of .* cannot be read \(.*null (byte|character)\)"):
        read_config_json("model\0")


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"a": "\\udc00"}', b'{"a": 1' + b"0" * 400 + b"}", b"\xff"])
def test_a_config_of_a_model_that_would_fail_later_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json of .* is not valid JSON"):
        read_config_json(str(tmp_path))


def test_a_config_at_an_address_may_be_as_large_as_one_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"a": 1}'
    fsspec.filesystem("memory").pipe_file("/sizes/config.json", content)
    monkeypatch.setattr(pretrained, "MAX_JSON_BYTES", len(content))
    assert read_config_json("memory://sizes/") == {"a": 1}
    monkeypatch.setattr(pretrained, "MAX_JSON_BYTES", len(content) - 2)
    with pytest.raises(CheckpointError, match="config.json of .* is not valid JSON"):  # no more is read
        read_config_json("memory://sizes/")


ODD_VALUES = {
    "surrogate.yaml": '"\\ud800"',
    "surrogate.json": '"\\ud800"',
    "digits.yaml": "0x" + "f" * 9000,
    "digits.json": "1" + "0" * 400,
    "digits.toml": "0x" + "f" * 9000,
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_values_that_nothing_can_print_are_refused(tmp_path: Path, name: str) -> None:
    value = ODD_VALUES[name]
    text = f"key = {value}" if name.endswith("toml") else f'{{"key": {value}}}'
    (tmp_path / name).write_text(text)
    with pytest.raises(JobError, match=name) as caught:
        Document.read(tmp_path / name)
    str(caught.value).encode()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["key.yaml", "key.json"])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"\\udc80": 1}')
    with pytest.raises(JobError, match=name) as caught:
        Document.read(tmp_path / name)
    str(caught.value).encode()


@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_a_number_that_no_code_can_print_is_refused_with_the_reason(tmp_path: Path, suffix: str) -> None:
    path, digits = tmp_path / f"key.{suffix}", "9" * 400
    path.write_text({"yaml": f"a: {digits}", "json": f'{{"a": {digits}}}', "toml": f"a = {digits}"}[suffix])
    with pytest.raises(JobError, match="a number may have at most 1000 bits; lower it, or quote it"):
        Document.read(path)


@pytest.mark.parametrize("value", [1e30, 2**63, -(2**70)])
def test_a_whole_number_has_64_bits(value: float) -> None:
    class Sizes(Section):
        size: int
        more: tuple[int, ...] = ()

    with pytest.raises(ValidationError, match="at most 64 bits|exceeded maximum size"):
        Sizes.model_validate({"size": value})
    with pytest.raises(ValidationError, match="at most 64 bits|exceeded maximum size"):
        Sizes.model_validate({"size": 1, "more": [2, value]})


@pytest.mark.parametrize("value", [1e15, 1e300])
def test_a_timeout_is_one_that_clocks_can_hold(value: float) -> None:
    with pytest.raises(ValidationError, match="less than or equal"):
        Timeouts.model_validate({"step": value})


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "/\x01/x"])
def test_a_plugin_file_of_a_name_that_the_system_refuses_is_not_there(name: str) -> None:
    with pytest.raises(JobError, match="plugins.files\\[0\\]: there is no file"):
        plugin_policy(Document({"plugins": {"files": [name]}}))


def test_a_mesh_has_no_more_processes_than_can_know_each_other() -> None:
    assert Mesh(dp_shard=1 << 17).world_size == 1 << 17
    with pytest.raises(ValidationError, match="262,144 processes; at most 131,072"):
        Mesh(dp_shard=1 << 17, tp=2)


def test_of_many_problems_some_are_spelled_out_and_the_rest_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"metrics": [1] * 1000}))
    with pytest.raises(JobError) as error:
        JobFile.load(file)
    lines = str(error.value).splitlines()
    assert len(lines) == 51
    assert lines[-1].startswith("and 9")
