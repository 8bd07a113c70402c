from __future__ import annotations

import os
from pathlib import Path

import pytest
from d9d_core.untrusted import MAX_JSON_DEPTH, Place, open_regular, parse_json, read_regular


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"abc"


def test_a_link_is_refused_where_links_are_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="the file is a symbolic link"):
        read_regular(tmp_path / "link", links="none")


def test_a_link_that_leaves_its_directory_is_refused_where_files_belong_together(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "file").write_bytes(b"abc")
    (tmp_path / "model" / "inside").symlink_to("deep/file")
    (tmp_path / "model" / "outside").symlink_to("../secret")
    (tmp_path / "model" / "twice").symlink_to("outside")
    (tmp_path / "linked").symlink_to("model")
    assert read_regular(tmp_path / "linked" / "inside", links="near") == b"abc"
    for name in ("outside", "twice"):
        with pytest.raises(OSError, match="the file is a symbolic link to another directory"):
            read_regular(tmp_path / "linked" / name, links="near")


def test_the_links_of_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(b"abc")
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    (tmp_path / "snapshots" / "main" / "config.json").symlink_to("../../blobs/0123")
    assert read_regular(tmp_path / "snapshots" / "main" / "config.json", links="near") == b"abc"


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="the path leads to a named pipe"):
        open_regular(tmp_path / "pipe")


@pytest.mark.parametrize(("path", "kind"), [("/dev/zero", "device"), ("/", "directory")])
def test_what_is_no_file_is_named(path: str, kind: str) -> None:
    with pytest.raises(OSError, match=f"the path leads to a {kind}; a regular file is needed"):
        read_regular(path)


def test_a_name_with_a_zero_byte_is_an_error_of_the_file_system() -> None:
    with pytest.raises(OSError, match="null"):
        open_regular("a\0b")


def test_a_file_is_not_read_beyond_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no byte of it is on the disk
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_regular(tmp_path / "large", limit=1000)


@pytest.mark.parametrize("value", [b'{"a": [1, 2.5, null, "\\"[[["]}', b"\xef\xbb\xbf[]", b'"\\ud83d\\ude00"', b"NaN"])
def test_json_is_parsed(value: bytes) -> None:
    parse_json(value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "nested more than 200 levels"),
        (b'{"a":' * 201 + b"1" + b"}" * 201, "nested more than 200 levels"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b"1" + b"0" * 400, "a number of 401 digits"),
        (b"\xff", "can't decode"),
        (b'"' + b'\\"' * 200_000, "Unterminated string"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_would_fail_later_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "1e999"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' appears twice"),
    ],
)
def test_json_that_means_nothing_certain_is_refused_where_it_is_ours(content: bytes, why: str) -> None:
    parse_json(content)
    with pytest.raises(ValueError, match=why):
        parse_json(content, strict=True)


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_json(b'["' + b"[{" * 500 + b'\\""]') == ["[{" * 500 + '"']
    assert parse_json(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)


@pytest.mark.parametrize(("name", "file"), [("model", "config.json"), ("adapter", "adapter_config.json")])
def test_the_export_of_a_run_belongs_to_the_run_and_a_copy_of_it_does_not(tmp_path: Path, name: str, file: str) -> None:
    for directory in (tmp_path / "run" / name, tmp_path / "run" / "copy", tmp_path / "alone" / name):
        directory.mkdir(parents=True)
        (directory / file).write_text("{}")
    (tmp_path / "run" / "job.yaml").write_text("")
    exported = Place.of(tmp_path / "run" / name)
    assert (exported.kind, exported.run) == (name, tmp_path / "run")
    assert list(exported.of_the_model())[1:] == [tmp_path / "run" / "model", tmp_path / "run" / "tokenizer"]
    for directory in (tmp_path / "run" / "copy", tmp_path / "alone" / name):
        assert (Place.of(directory).kind, Place.of(directory).run) == (name, None)


def test_places_are_known_by_their_files(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "other" / "step-00000003").mkdir(parents=True)
    (tmp_path / "other" / "step-00000003" / "manifest.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    found = {
        str(path.relative_to(tmp_path)): (place.kind, place.run, place.checkpoints)
        for path in (checkpoint, checkpoint.parent, tmp_path / "run", tmp_path / "other", tmp_path / "empty")
        for place in [Place.of(path)]
    }
    run, other = tmp_path / "run", tmp_path / "other"
    assert found == {
        "run/checkpoints/step-00000002": ("checkpoint", run, checkpoint),
        "run/checkpoints": ("checkpoints", run, checkpoint.parent),
        "run": ("run", run, checkpoint.parent),
        "other": ("checkpoints", None, other),
        "empty": ("nothing", None, None),
    }
    assert Place.of("s3://bucket/x").kind == "address"
    file = Place.of(checkpoint / "manifest.json")
    assert (file.kind, list(file.of_the_model())) == ("file", [checkpoint])
