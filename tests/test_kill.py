"""Killed at any moment, even while saving, a run resumes to the weights of an undisturbed one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from d9d_testing.logs import read_log_without_times
from safetensors.torch import load_file

Write = Callable[..., Path]
#: A launch that has not ended after this many seconds hangs.
PATIENCE = 120


@contextmanager
def training(job: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "d9d_core", "train", str(job)]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(job: Path) -> None:
    with training(job) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out


def kill_once(job: Path, run: Path, choice: random.Random) -> str:
    """Start, wait for a random moment, kill -9. Says which kind of moment it was."""
    kind = choice.choice(["start-up", "training", "saving", "saving"])
    before = _logged_at(run)
    with training(job) as process:
        deadline = time.monotonic() + PATIENCE
        if kind == "start-up":
            time.sleep(choice.uniform(0, 5))
        else:
            wait_for(lambda: _logged_at(run) > before, process, deadline)
            if kind == "training":
                time.sleep(choice.uniform(0, 0.3))
            else:
                wait_for(lambda: any((run / "checkpoints").glob(".step-*.tmp")), process, deadline)
                time.sleep(choice.uniform(0, 0.02))
        process.kill()
        process.communicate()
    return kind if process.returncode == -9 else "finished"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], deadline: float) -> None:
    while not condition():
        if process.poll() is not None:
            return
        assert time.monotonic() < deadline, "the run makes no progress"


def _logged_at(run: Path) -> int:
    """When the log was last written, 0 if never; the start of a launch writes it too."""
    try:
        return (run / "metrics.jsonl").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def compare(straight: Path, broken: Path) -> None:
    for part in ("checkpoints/step-{:08d}/tensors-00000.safetensors", "model/model.safetensors"):
        name = part.format(max(int(p.name[5:]) for p in (straight / "checkpoints").glob("step-*")))
        a, b = load_file(straight / name), load_file(broken / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert read_log_without_times(straight) == read_log_without_times(broken)
    assert not list((broken / "checkpoints").glob(".*.tmp"))


def campaign(write: Write, runs: Path, kills: int, steps: int, seed: int) -> dict[str, int]:
    sections = {"steps": steps, "checkpoint": {"every": 5}, "logging": {"every": 4}}
    straight, broken = write("straight", **sections), write("broken", **sections)
    finish(straight)
    choice = random.Random(seed)
    moments: dict[str, int] = {}
    for _ in range(kills):
        kind = kill_once(broken, runs / "broken", choice)
        moments[kind] = moments.get(kind, 0) + 1
    finish(broken)
    compare(runs / "straight", runs / "broken")
    return moments


@pytest.mark.full
def test_a_few_kills_change_nothing(small_job: Write, tmp_path: Path) -> None:
    moments = campaign(small_job, tmp_path / "runs", kills=4, steps=200, seed=1)
    assert set(moments) - {"finished", "start-up"}, moments


@pytest.mark.slow
def test_fifty_kills_change_nothing(small_job: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = campaign(small_job, tmp_path / "runs", kills=50, steps=1500, seed=2)
    with capsys.disabled():
        print(f"\nkilled 50 times: {moments}")
    assert sum(moments.values()) - moments.get("finished", 0) == 50
    assert moments["saving"] >= 10
