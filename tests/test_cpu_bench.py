"""The bench of what d9d costs on a CPU: its parts, its turns, and the page that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tools" / "bench"
NAMES = ("records", "cpu_parts", "cpu")


@pytest.mark.slow
def test_every_part_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "cpu.py"), "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("cpu--*.json")
    result = json.loads(path.read_text())
    names = " ".join(result["cpu"])
    for part in (
        "--help",
        "check JOB",
        "job file",
        "state graph",
        "through mappers",
        "simulate",
        "save",
        "load",
        "step",
    ):
        assert part in names
    assert all(len(found["seconds"]) == 1 and found["seconds"][0] > 0 for found in result["cpu"].values())
    assert result["against"] is None
    assert result["commit"]
    assert "| quickstart: a training step |" in done.stdout


@pytest.mark.parametrize("part", ["config", "simulator"])
def test_a_part_gives_seconds_by_name(room: SimpleNamespace, part: str) -> None:
    seconds = room.cpu_parts.PARTS[part]()
    assert seconds
    assert all(0 < value < 10 for value in seconds.values())


def test_sides_take_turns_and_the_first_round_does_not_count(room: SimpleNamespace) -> None:
    asked: list[tuple[str, str]] = []

    def ask(part: str, python: str) -> dict[str, float]:
        asked.append((part, python))
        return {f"{part}: one": 1.0 if python == "new" else 2.0 + len(asked)}

    said: list[str] = []
    found = room.cpu.rounds(["new", "old"], ["a", "b"], 2, ask, said.append)
    sides = [python for part, python in asked if part == "a"]
    assert sides == ["new", "old", "old", "new", "new", "old"]
    assert said == ["warmed up", "round 1 of 2", "round 2 of 2"]
    assert found["a: one"][0] == [1.0, 1.0]
    assert len(found["a: one"][1]) == 2
    assert 4.0 not in found["a: one"][1]  # that was the one before the rounds


def test_ratios_are_those_of_rounds(room: SimpleNamespace) -> None:
    assert room.cpu.summary([[1.0, 3.0], [2.0, 2.0]]) == {
        "seconds": [1.0, 3.0], "against": [2.0, 2.0], "ratios": [0.5, 1.5],
    }  # fmt: skip
    assert room.cpu.summary([[1.0]]) == {"seconds": [1.0]}


def test_tables_show_both_sides_and_the_spread(room: SimpleNamespace) -> None:
    hardware = {"device": "CPU, 2 cores", "versions": {"torch": "2.15.0"}}
    result = {
        "table": "cpu", "taken": "2026-11-23", "command": "python tools/bench/cpu.py", "commit": "abc",
        "hardware": hardware, "against": "def",
        room.cpu.KIND: {"d9d --help": room.cpu.summary([[0.1, 0.3, 0.2], [0.1, 0.2, 0.1]])},
    }  # fmt: skip
    text = room.cpu.text_of([result])
    assert "|  | ms | ms at def | ratio | from | to |" in text
    assert "| d9d --help | 200.00 | 100.00 | 1.500 | 1.000 | 2.000 |" in text
    alone = {**result, "against": None, room.cpu.KIND: {"d9d --help": room.cpu.summary([[0.1]])}}
    assert "| d9d --help | 100.00 |" in room.cpu.text_of([alone])
    assert room.cpu.text_of([]) == room.cpu.NONE_YET


def test_an_unknown_commit_is_refused_before_anything_is_made(room: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no-such-commit"), room.cpu.revision("no-such-commit", tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_part_that_fails_ends_the_bench_with_its_last_lines(room: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match=r"(?s)cpu_parts.py nothing .* ended with status 1.*KeyError: 'nothing'"):
        room.cpu.ask("nothing", sys.executable)


def test_the_page_has_the_tables_of_the_files_beside_it(room: SimpleNamespace) -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    text = room.cpu.text_of(room.records.read(folder, room.cpu.KIND))
    assert page == room.records.fill(page, text, room.cpu.MARKS), "run: uv run python tools/bench/cpu.py --tables"
