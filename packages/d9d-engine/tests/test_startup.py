"""Start of ``d9d train``: the record of its phases, its imports, and Ctrl-C in each phase."""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
import torch
from d9d_core.launcher import EXIT_STOPPED
from d9d_engine.compose.initialise import Undrawn
from d9d_engine.launch.startup import FILE, StartUp
from d9d_weights import progress
from torch import nn

PATIENCE = 60
ALONE = [
    "plugins", "job", "torch", "modules", "plan", "data", "weights", "optimizer", "trainer", "first step",
]  # fmt: skip
JOB: dict[str, Any] = {
    "run": {"name": "toy"},
    "device": "cpu",
    "steps": 2,
    "batch": {"size": 4},
    "model": "toy_model",
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": "toy_optimizer",
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    return [
        sys.executable,
        "-m",
        "d9d_core",
        "train",
        str(tmp_path / "job.json"),
        "--no-plugins",
        "--plugin",
        toy.__file__,
    ]


def interrupted(command: list[str], after: str, where: Path) -> tuple[int, str]:
    """Exit status and standard error of a command that gets SIGINT when it has printed a line that begins so."""
    code = "from d9d_engine.launch import startup\nfrom d9d_core.cli.main import main\nstartup._TOLD = 0.0\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command[3:], "--set", "steps=1000000"],
        cwd=where,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _read_until(process.stdout.fileno(), after)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            return process.wait(PATIENCE), process.stderr.read().decode()
        finally:
            process.kill()


def _read_until(file: int, beginning: str) -> None:
    text, deadline = "", time.monotonic() + PATIENCE
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while not any(line.startswith(beginning) for line in text.splitlines()):
            assert time.monotonic() < deadline
            if selector.select(1):
                text += (data := os.read(file, 65536)).decode()
                assert data, text


@pytest.mark.full
def test_a_run_records_the_seconds_of_its_phases(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    record = json.loads((tmp_path / "runs" / "toy" / FILE).read_text())
    assert {"python", "system", "torch", "d9d-engine"} <= record["environment"].keys()
    assert [phase["name"] for phase in record["phases"]] == ALONE
    assert record["processes"] == 1
    assert all(phase["wall"] >= 0 and phase["cpu"] >= 0 for phase in record["phases"])
    assert record["cpu"] == pytest.approx(sum(phase["cpu"] for phase in record["phases"]))
    lines = done.stdout.splitlines()
    said = [line.split()[1] for line in lines if line.startswith("start-up: ")]
    assert said == [phase["name"] for phase in record["phases"][:-1] if phase["wall"] >= 1]
    (ready,) = (line for line in lines if line.startswith("ready after "))
    shown = [part.rpartition(" ")[0] for part in ready.partition(": ")[2].split(", ") if part]
    assert shown == [phase["name"] for phase in record["phases"] if phase["wall"] >= 1]
    assert json.loads((tmp_path / "runs" / "toy" / "facts.json").read_text())["data"] == {"features": 4}


@pytest.mark.full
def test_a_start_on_one_process_needs_no_compiler_no_algebra_and_no_dtensors(
    command: list[str], tmp_path: Path
) -> None:
    # Each of them takes a second or more. What training needs later is imported when it is needed.
    code = (
        "import sys, d9d_core.cli.main as cli\n"
        "from d9d_engine.launch.startup import StartUp\n"
        "write = StartUp._finish\n"
        "def first(self, name):\n"
        "    write(self, name)\n"
        "    print('imported:', *(name for name in NAMES if name in sys.modules))\n"
        "StartUp._finish = first\n"
        "NAMES = ('torch._dynamo', 'torch._inductor', 'sympy', 'torch.distributed.tensor', 'triton.language',\n"
        "         'torch.distributed.checkpoint', 'matplotlib', 'transformers', 'datasets', 'pandas', 'pyarrow')\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:]], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert next(line for line in done.stdout.splitlines() if line.startswith("imported:")) == "imported:"


def test_only_one_of_several_processes_shows_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with StartUp(said.append, shown=False, processes=2) as start:
        start.ends("plugins", following="job")
    assert (said, capsys.readouterr().err) == ([], "")
    assert [phase.name for phase in start.phases] == ["plugins"]


def test_on_a_terminal_the_current_phase_is_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, said = Terminal(), list[str]()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with StartUp(said.append, shown=True) as start:
        start.ends("plugins", following="job")
    assert "start-up" not in terminal.getvalue(), "a short phase flickers"
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with StartUp(said.append, shown=True) as start:
        start.ends("job", following="torch")
    assert "start-up: importing torch" in terminal.getvalue()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")  # the cursor is back
    assert said == []


@pytest.mark.thorough
def test_meta_tensors_are_not_drawn_and_others_are() -> None:
    with Undrawn():
        with torch.device("meta"):
            layer = nn.Linear(2, 2)
            nn.init.trunc_normal_(layer.weight)
            assert layer.weight.normal_().is_meta
            like = torch.zeros_like(layer.weight.T, dtype=torch.int16)
        assert (like.is_meta, like.shape, like.stride(), like.dtype) == (True, (2, 2), (1, 2), torch.int16)
        same = torch.zeros_like(layer.bias, memory_format=torch.preserve_format, requires_grad=False)
        assert (same.is_meta, same.shape, same.requires_grad) == (True, (2,), False)
        assert torch.zeros_like(layer.bias, device="cpu").tolist() == [0, 0]
        assert torch.zeros_like(layer.bias, requires_grad=True).requires_grad
        drawn = nn.init.ones_(torch.zeros(3))
        filled = torch.zeros(3).uniform_(1, 2)
    assert drawn.tolist() == [1, 1, 1]
    assert filled.min() >= 1


@pytest.mark.full
@pytest.mark.parametrize("phase", ["job", "torch", "trainer"])
def test_ctrl_c_during_start_up_is_one_line(command: list[str], tmp_path: Path, phase: str) -> None:
    status, errors = interrupted(command, f"start-up: {phase}", tmp_path)
    if phase == "trainer":  # the step ends, and is saved
        assert (status, errors) == (EXIT_STOPPED, "")
    else:
        assert (status, errors) == (130, "interrupted: during start-up; nothing was trained\n")
