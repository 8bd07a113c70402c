"""Hostile files of every kind, drawn: each is refused by an error of ours, or read as the sound file is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from d9d_core.errors import JobError
from d9d_testing.hostile.judge import Judge, WrongLoad

Fault = tuple[int, str]
LONG = {
    "jobs": 10_000, "models": 2_000, "checkpoints": 1_000, "tokenizers": 2_000, "runs": 2_000, "adapters": 10_000,
    "tables": 2_000, "templates": 500, "generations": 2_000, "rows": 10_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def campaign(tool: Callable[[str], ModuleType]) -> ModuleType:
    """The tool that runs campaigns."""
    return tool("hostile_campaign")


@pytest.fixture(scope="module")
def rows(tool: Callable[[str], ModuleType]) -> ModuleType:
    """The part of the tool that reads datasets and writes rows."""
    return tool("hostile_rows")


def faults(campaign: ModuleType, **examples: int) -> dict[str, dict[str, Fault]]:
    reports = campaign.run(examples, 0)
    assert {kind: report.counts.total() for kind, report in reports.items()} == examples
    return {kind: report.faults for kind, report in reports.items() if report.faults}


@pytest.mark.full
def test_a_sample_of_hostile_files_does_no_harm(campaign: ModuleType) -> None:
    few = {"runs": 25, "adapters": 100, "tables": 25, "templates": 10, "generations": 20, "rows": 60}
    assert faults(campaign, jobs=15, models=10, checkpoints=25, tokenizers=25, **few) == {}


@pytest.mark.slow
def test_hostile_files_do_no_harm(campaign: ModuleType) -> None:
    assert faults(campaign, **LONG) == {}


@pytest.mark.thorough
def test_a_judge_tells_what_readers_do(tmp_path: Path) -> None:
    judge, brief = Judge(tmp_path / "inside"), Judge(tmp_path / "inside", seconds=0.05)
    (tmp_path / "inside").mkdir()
    for place in ("inside/file", "outside"):
        (tmp_path / place).write_text("x")

    def fail(error: BaseException) -> None:
        raise error

    def spin() -> None:
        while True:
            pass

    kinds = {
        "read": (tmp_path / "inside" / "file").read_text,
        "refused": lambda: fail(JobError("no such job")),
        "traceback": lambda: fail(KeyError("x")),
        "hang": spin,
        "outside": (tmp_path / "outside").read_text,
        "wrong": lambda: fail(WrongLoad("values of x")),
    }
    found = {kind: (brief if kind == "hang" else judge)(read).kind for kind, read in kinds.items()}
    assert found == {kind: kind for kind in kinds}
    assert judge(lambda: fail(JobError("\ud800"))).kind == "traceback"
    assert judge(lambda: (tmp_path / "new").write_text("x")).kind == "outside"


def test_an_alarm_that_comes_when_a_reader_has_just_ended_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setitimer, before = signal.setitimer, signal.getsignal(signal.SIGPROF)
    signals = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}

    def late(clock: int, seconds: float, interval: float = 0) -> tuple[float, float]:
        if not seconds:
            signal.raise_signal(signals[clock])
        return setitimer(clock, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", late)
    assert Judge(tmp_path)(lambda: None).kind == "read"
    assert signal.getsignal(signal.SIGPROF) == before


@pytest.mark.thorough
@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_a_pass_without_a_row_or_with_one_twice_is_wrong(rows: ModuleType, numbers: list[int]) -> None:
    packs = iter([[{"rows": torch.tensor([*numbers, -1])}], [], []])
    stream = SimpleNamespace(facts={"rows": 3, "samples": 2}, next_pack=lambda: next(packs))
    with pytest.raises(WrongLoad, match="of 3"):
        rows.rows_of(stream)


@pytest.mark.thorough
def test_rows_are_read_back_as_they_were_written(rows: ModuleType, tmp_path: Path) -> None:
    rows.write_rows(range(5), ["a\n\x1b[2J\u2028", "\0", "é\u202e"], tmp_path)
