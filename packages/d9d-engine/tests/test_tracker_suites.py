"""Core's own trackers keep what holds for every one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.tracker import RunInfo
from d9d_core.types import State
from d9d_engine.job import print_note
from d9d_engine.trackers import lines
from d9d_engine.trackers.config import JsonlConfig
from d9d_engine.trackers.console import ConsoleRun
from d9d_engine.trackers.jsonl import JsonlRun, JsonlTracker
from d9d_engine.trackers.lines import LineFile, read_lines
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step


class TestConsole(TrackerSuite):
    target = "console"

    def broken_fields(self, directory: Path) -> None:
        """Nothing: a full disk behind the standard output ends nothing, as a test below shows."""


class TestJsonl(TrackerSuite):
    target = "jsonl"
    config: ClassVar = {"picture": False}

    def logged(self, directory: Path) -> Logged:
        lines = read_lines(directory / "metrics.jsonl")
        return by_step((line["step"], name, line[name]) for line in lines for name in line if name != "step")

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in read_lines(directory / "tables.jsonl"):
            found.setdefault(line["step"], []).append(line["table"])
        return found

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        if kind == "pictures":
            for path in directory.glob("pictures/*/*.png"):
                assert path.read_bytes().startswith(b"\x89PNG")
                found.setdefault(int(path.stem), []).append(path.parent.name.replace("%2F", "/"))
            return found
        for line in read_lines(directory / f"{kind}.jsonl"):
            found.setdefault(line["step"], []).append(line["name" if kind == "texts" else "histogram"])
        return found

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]] | None:
        if kind == "pictures":
            return None
        found: dict[int, dict[str, Any]] = {}
        for line in read_lines(directory / f"{kind}.jsonl"):
            contents = found.setdefault(line["step"], {})
            if kind == "tables":
                names = line.get("rows") or map(str, range(len(line["values"])))
                contents[line["table"]] = [[name, *row] for name, row in zip(names, line["values"], strict=True)]
            else:
                name, content = ("name", "text") if kind == "texts" else ("histogram", "counts")
                contents[line[name]] = line[content]
        return found


def test_what_came_between_a_checkpoint_and_the_next_step_is_there_once_after_a_resume(tmp_path: Path) -> None:
    def opened(resumed_step: int, state: State | None) -> JsonlRun:
        info = RunInfo("run", tmp_path, "", {}, 10, resumed_step)
        return JsonlTracker(JsonlConfig(picture=False)).open(info, state)

    run = opened(0, None)
    run.write(4, {"loss": 1.0})
    run.write_texts(4, {"said": "before"})
    run.flush()
    state = run.state()
    for step in (4, 5):
        run.write(step, {"reward": 1.0})
        run.write_texts(step, {"said": "after"})
    run.close("failed")
    again = opened(4, state)
    assert again.state() == state
    again.write(4, {"reward": 2.0})
    again.write_texts(4, {"said": "again"})
    again.close("finished")
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"step": 4, "loss": 1.0}, {"step": 4, "reward": 2.0}]
    assert [line["text"] for line in read_lines(tmp_path / "texts.jsonl")] == ["before", "again"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_lines_wait_for_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = LineFile(tmp_path / "metrics.jsonl", 0)
    file.append({"step": 1})
    with Path("/dev/full").open("ab", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(file, "_file", full)
        for step in (2, 3):
            file.append({"step": step})
        file.sync()
        assert capsys.readouterr().err.count("No space left on device; lines wait in memory") == 1
        patch.setattr(lines, "ROOM", 20)
        with pytest.raises(OSError, match="No space left"):
            file.append({"step": 4})
    assert [line["step"] for line in read_lines(file.path)] == [1]
    file.append({"step": 5})
    assert [line["step"] for line in read_lines(file.path)] == [1, 2, 3, 4, 5]
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_output_that_goes_to_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "metrics.jsonl", 0)
    with Path("/dev/full").open("w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        patch.setattr(sys, "stderr", full)
        ConsoleRun(10).write(1, {"loss": 1.0})
        print_note("checkpoint at step 1")
        patch.setattr(file, "_write", lambda: OSError(28, "No space left on device"))
        file.append({"step": 1})
        with suppress(OSError):
            full.close()
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_lines_that_cannot_be_written_in_the_end_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "metrics.jsonl", 0)
    with Path("/dev/full").open("ab", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(file, "_file", full)
        file.append({"step": 1})
        with pytest.raises(OSError, match="No space left"):
            file.close()
    file.close()


def test_only_whole_lines_with_a_number_of_a_step_are_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    one, three = '{"step": 1, "loss": 2.5}\n', '{"step": 3, "loss": 0.5}\n'
    strange = '{"loss": 1.0}\n{"step": "2"}\n{"step": null}\n[1]\n2\n{"step": 2\n'
    path.write_text(f"{one}{strange}{three}")
    assert list(read_lines(path)) == [{"step": 1, "loss": 2.5}, {"step": 3, "loss": 0.5}]
    LineFile(path, 2).close()
    assert path.read_text() == one
    assert list(read_lines(tmp_path / "missing")) == []


def test_of_the_resumed_step_lines_within_the_saved_length_are_kept(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", '{"step": 2}\n'
    for length, kept in ((None, 3), (0, 0), (len(line), 1), (len(line) + 1, 2)):
        path.write_text(3 * line)
        file = LineFile(path, 2, length=length)
        assert (path.read_text(), file.length) == (kept * line, kept * len(line))
        file.append({"step": 2})
        file.close()
        assert path.read_text() == (kept + 1) * line
