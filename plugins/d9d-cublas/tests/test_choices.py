"""Choices on disk: kept, shared between processes, and never the end of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from d9d_cublas.choices import SHIPPED, Choice, Choices, Key, cache_file, read, write
from d9d_cublas.problem import Problem, Settings

PROBLEM = Problem("forward", 16384, 6144, 2048, "bfloat16")
KEY = Key("some GPU", 130100, PROBLEM)
FAST = Choice(Settings(66, tile=36, stages=35, cluster=3), (0.626, 0.592))
DEFAULT = Choice(None, (0.6, 0.6))


def test_choices_are_kept_for_the_next_run(tmp_path: Path) -> None:
    cache = tmp_path / "absent" / "cublas.json"
    assert Choices(cache).find(KEY) is None
    assert Choices(cache).record(KEY, FAST) == FAST
    assert Choices(cache).find(KEY) == FAST


def test_the_default_is_a_choice_too(tmp_path: Path) -> None:
    Choices(tmp_path / "cublas.json").record(KEY, DEFAULT)
    assert Choices(tmp_path / "cublas.json").find(KEY) == DEFAULT


def test_who_records_first_wins_and_others_adopt_it(tmp_path: Path) -> None:
    one, other = (Choices(tmp_path / "cublas.json") for _ in range(2))
    assert one.find(KEY) is other.find(KEY) is None
    assert one.record(KEY, FAST) == FAST
    assert other.record(KEY, DEFAULT) == FAST
    assert other.find(KEY) == one.find(KEY) == FAST


def test_what_others_record_meanwhile_is_found_and_stays(tmp_path: Path) -> None:
    one, other = (Choices(tmp_path / "cublas.json") for _ in range(2))
    second = Key("some GPU", 130100, Problem("rows_gradient", 16384, 6144, 2048, "bfloat16"))
    one.record(KEY, FAST)
    other.record(second, DEFAULT)
    assert one.find(second) == DEFAULT
    assert read(tmp_path / "cublas.json") == {KEY: FAST, second: DEFAULT}


@pytest.mark.parametrize("change", [{"library": 130200}, {"device": "another GPU"}])
def test_choices_of_another_version_or_device_are_not_taken(tmp_path: Path, change: Any) -> None:
    Choices(tmp_path / "cublas.json").record(
        Key(**{"device": KEY.device, "library": KEY.library} | change, problem=PROBLEM), FAST
    )
    assert Choices(tmp_path / "cublas.json").find(KEY) is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 2, "choices": []}',
        '{"format": 1, "choices": [{"device": "x"}]}',
        '{"format": 1, "choices": 3}',
        "\xff\xfe",
    ],
)
def test_a_broken_or_foreign_file_is_left_alone_after_one_warning(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "cublas.json"
    cache.write_bytes(content.encode("latin-1"))
    choices = Choices(cache)
    with pytest.warns(RuntimeWarning, match=r"cublas.json cannot be used .*delete it"):
        assert choices.find(KEY) is None
    # A second warning would be an error.
    assert choices.record(KEY, FAST) == FAST
    assert choices.find(KEY) == FAST
    assert cache.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize("change", [{"layout": "sideways"}, {"rows": "many"}, {"algorithm": {"id": -1}}])
def test_impossible_values_are_refused(tmp_path: Path, change: Any) -> None:
    write(tmp_path / "cublas.json", {KEY: FAST})
    content = json.loads((tmp_path / "cublas.json").read_text())
    content["choices"][0] |= change
    (tmp_path / "cublas.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="impossible values"):
        read(tmp_path / "cublas.json")


def test_where_nothing_can_be_written_choices_last_as_long_as_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choices = Choices(tmp_path / "file" / "cublas.json")
    with pytest.warns(RuntimeWarning, match="cannot be"):
        assert choices.record(KEY, FAST) == FAST
    assert choices.find(KEY) == FAST


def test_choices_of_the_package_stand_behind_those_of_the_user(tmp_path: Path) -> None:
    write(tmp_path / "shipped.json", {KEY: FAST})
    choices = Choices(tmp_path / "cublas.json", tmp_path / "shipped.json")
    assert choices.find(KEY) == FAST
    assert not (tmp_path / "cublas.json").exists()
    choices.record(KEY, DEFAULT)
    assert choices.find(KEY) == DEFAULT
    assert choices.find_shipped(KEY) == FAST


def test_the_packages_own_file_is_in_order(tmp_path: Path) -> None:
    write(tmp_path / "again.json", read(SHIPPED))
    assert (tmp_path / "again.json").read_text() == SHIPPED.read_text()


def test_the_file_is_below_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_file() == Path("/somewhere/d9d/cublas.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file() == Path("~/.cache/d9d/cublas.json").expanduser()


RECORD_MANY = """
import sys
from pathlib import Path
from d9d_cublas.choices import Choice, Choices, Key
from d9d_cublas.problem import Problem, Settings

choices = Choices(Path(sys.argv[1]))
for rows in range(20):
    choices.record(Key("x", 1, Problem("forward", rows, 8, 8, "bfloat16")), Choice(Settings(int(sys.argv[2]))))
"""


@pytest.mark.full
def test_processes_that_record_at_once_agree_and_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RECORD_MANY, str(tmp_path / "cublas.json")]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(read(tmp_path / "cublas.json")) == 20
    assert {path.name for path in tmp_path.iterdir()} == {"cublas.json", "cublas.lock"}


def test_an_algorithm_has_the_defaults_of_the_library() -> None:
    found = Settings(7)
    assert [getattr(found, field.name) for field in fields(found)] == [7, 0, 0, 0, 0, 0, 1, 0, 0]


def test_folders_of_the_file_are_made(tmp_path: Path) -> None:
    cache = tmp_path / "of" / "the" / "user" / "cublas.json"
    choices = Choices(cache)
    choices.record(KEY, FAST)
    assert read(cache) == {KEY: FAST}
    assert sorted(path.name for path in cache.parent.iterdir()) == ["cublas.json", "cublas.lock"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "cublas.json").mkdir()
    with pytest.raises(OSError, match="cublas.json"):
        write(tmp_path / "cublas.json", {KEY: FAST})
    assert [path.name for path in tmp_path.iterdir()] == ["cublas.json"]


def test_a_file_has_a_line_for_each_choice(tmp_path: Path) -> None:
    write(tmp_path / "cublas.json", {KEY: DEFAULT})
    assert (tmp_path / "cublas.json").read_text() == (
        '{\n "format": 1,\n "choices": [\n  {"device": "some GPU", "library": 130100, "layout": "forward", '
        '"rows": 16384, "out_features": 6144, "in_features": 2048, "dtype": "bfloat16", "algorithm": null, '
        '"milliseconds": [0.6, 0.6]}\n ]\n}\n'
    )


def test_numbers_of_a_choice_may_be_zero_and_times_may_be_missing(tmp_path: Path) -> None:
    none = Key("some GPU", 0, Problem("forward", 0, 0, 0, "bfloat16"))
    write(tmp_path / "cublas.json", {none: Choice(Settings(0, split_k=0))})
    assert read(tmp_path / "cublas.json") == {none: Choice(Settings(0, split_k=0), None)}
    content = json.loads((tmp_path / "cublas.json").read_text())
    del content["choices"][0]["milliseconds"]
    (tmp_path / "cublas.json").write_text(json.dumps(content))
    assert read(tmp_path / "cublas.json") == {none: Choice(Settings(0, split_k=0), None)}
    content["choices"][0]["rows"] = True
    (tmp_path / "cublas.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="impossible values"):
        read(tmp_path / "cublas.json")
